"""Grafana dashboard and Prometheus alert rules, as code and as files to provision."""
