"""KV memory: a paged pool with reference counts, copy-on-write and reuse of computed prefixes."""

from kaiseki.memory.hashing import chain_hashes
from kaiseki.memory.pool import BlockPool, PoolStats

__all__ = ["BlockPool", "PoolStats", "chain_hashes"]
