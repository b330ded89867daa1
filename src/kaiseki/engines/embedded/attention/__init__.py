"""Attention over paged KV: one backend per kind of device, behind transformers' attention interface."""

from kaiseki.engines.embedded.attention.base import AttentionBackend, PoolShape
from kaiseki.engines.embedded.attention.interface import IMPLEMENTATION, PagedStep, register

__all__ = ["IMPLEMENTATION", "AttentionBackend", "PagedStep", "PoolShape", "register"]
