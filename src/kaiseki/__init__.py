"""Kaiseki: a token-level scheduler for LLM inference that can explain every decision."""

__version__ = "0.1.0"
