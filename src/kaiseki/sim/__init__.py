"""Fleets that are simulated: the same core, policies and KV accounting as in a server, on a virtual clock."""
