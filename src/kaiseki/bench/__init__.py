"""Measurements of Kaiseki's own parts, one module each; `kaiseki bench` runs them."""
