"""The seam between the model's attention layers and a paged KV pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kaiseki.core.decision import I32, Way
from kaiseki.engines.embedded.batch import Batch


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Size of a KV pool: K and V for `layers` x `blocks` x `block_tokens` x `kv_heads` x `head_dim`.

    `host_blocks` more are in host memory, for KV of requests that were stopped.
    """

    layers: int
    blocks: int
    block_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    host_blocks: int = 0

    @property
    def bytes(self) -> int:
        """Memory the whole pool takes."""
        per_block = self.block_tokens * self.kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * self.layers * self.blocks * per_block


def one_way(swaps: I32) -> Iterator[tuple[Way, I32, I32]]:
    """Swaps in consecutive parts of one direction: (way, sources, destinations)."""
    for part in np.split(swaps, np.flatnonzero(np.diff(swaps[:, 0])) + 1):
        yield Way(int(part[0, 0])), part[:, 1], part[:, 2]


class AttentionBackend(Protocol):
    """Owns the KV pool, in whatever layout its kernels like, and attends through block tables."""

    @property
    def shape(self) -> PoolShape:
        """Size of the pool."""
        ...

    def copy_blocks(self, copies: I32) -> None:
        """Copy KV blocks in all layers; `copies` is int32[k, 2] of (source, destination)."""
        ...

    def swap_blocks(self, swaps: I32) -> None:
        """Move KV blocks to and from host memory in all layers, in this order; see `Decision.swaps`."""
        ...

    def plan(self, batch: Batch) -> Any:
        """What all layers of one forward share; given back to `attend`."""
        ...

    def attend(
        self, plan: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Put the new K and V into the pool, then attend causally to all of each sequence so far.

        Args:
            plan: from `plan`.
            layer: index of the layer.
            query: [T, heads, head_dim].
            key, value: [T, kv_heads, head_dim].
            scale: factor on query-key products.

        Returns:
            [T, heads, head_dim], in the type of `query`.
        """
        ...
