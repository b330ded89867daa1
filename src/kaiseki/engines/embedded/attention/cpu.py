"""Paged attention on CPUs.

Single tokens (decodes, and chunks of a few tokens) go through loops that read KV blocks in place. Longer
chunks compute enough per key that copying a head's keys into the order of tiles first is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kaiseki.core.decision import I32, I64, Way
from kaiseki.engines.embedded.attention import chunks, kernels, placing
from kaiseki.engines.embedded.attention.base import PoolShape, one_way
from kaiseki.engines.embedded.batch import Batch
from kaiseki.engines.embedded.compiled import F32, SERIAL_ROWS, view

SHORT_CHUNK = 4
"""Chunks up to this many tokens are attended token by token."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Work of one forward, the same for every layer.

    `tokens`, `owners`, `ends`, `cuts` are for `kernels.attend`; `chunks`, `items`, `item_cuts` (as `cuts`)
    for `chunks.attend_chunks`.
    """

    slots: I64
    tables: I32
    tokens: I64
    owners: I32
    ends: I32
    cuts: I32
    chunks: I32
    items: I32
    item_cuts: I32


class CpuAttention:
    """An `AttentionBackend` whose pool is NumPy arrays, bfloat16 as uint16."""

    def __init__(self, shape: PoolShape, threads: int) -> None:
        """Allocate the pool.

        Raises:
            ValueError: the element type is neither float32 nor bfloat16.
        """
        if shape.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the CPU engine computes in float32 or bfloat16, not {shape.dtype}")
        self._shape = shape
        self._threads = threads
        size = (shape.blocks, shape.kv_heads, shape.block_tokens, shape.head_dim)
        element = np.uint16 if shape.dtype == torch.bfloat16 else np.float32
        # NumPy asks for huge pages, unlike Torch: blocks are read in any order.
        self._pools = [(np.zeros(size, element), np.zeros(size, element)) for _ in range(shape.layers)]
        size = (shape.host_blocks, *size[1:])
        self._hosts = [(np.zeros(size, element), np.zeros(size, element)) for _ in range(shape.layers)]

    @property
    def shape(self) -> PoolShape:
        """See `AttentionBackend`."""
        return self._shape

    def copy_blocks(self, copies: I32) -> None:
        """See `AttentionBackend`."""
        source, destination = copies[:, 0], copies[:, 1]
        for keys, values in self._pools:
            keys[destination] = keys[source]
            values[destination] = values[source]

    def swap_blocks(self, swaps: I32) -> None:
        """See `AttentionBackend`; here host memory is another arena of the same memory."""
        for way, source, destination in one_way(swaps):
            for pools, hosts in zip(self._pools, self._hosts, strict=True):
                for pool, host in zip(pools, hosts, strict=True):
                    if way == Way.OUT:
                        host[destination] = pool[source]
                    else:
                        pool[destination] = host[source]

    def plan(self, batch: Batch) -> CpuPlan:
        """See `AttentionBackend`."""
        shape, lengths = self._shape, batch.lengths
        short, long = np.flatnonzero(lengths <= SHORT_CHUNK), np.flatnonzero(lengths > SHORT_CHUNK)
        owners = np.repeat(short.astype(np.int32), lengths[short])
        last = np.cumsum(lengths[short])
        within = np.arange(owners.size) - np.repeat(last - lengths[short], lengths[short])
        tokens = batch.bounds[owners] + within
        ends = (batch.positions[tokens] + 1).astype(np.int32)
        starts = batch.ends[long] - lengths[long]
        found = np.stack([long, batch.bounds[long], starts, batch.ends[long]], 1).astype(np.int32)
        group = shape.heads // shape.kv_heads
        items = chunks.items_of(found, shape.kv_heads, group)
        return CpuPlan(
            slots=batch.slots,
            tables=batch.tables,
            tokens=tokens.astype(np.int64),
            owners=owners,
            ends=ends,
            cuts=_even_cuts(np.repeat(ends, shape.kv_heads), self._threads),
            chunks=found,
            items=items,
            item_cuts=_even_cuts(items[:, chunks.COUNT] * chunks.ends_of(items, found, group), self._threads),
        )

    def attend(
        self,
        plan: CpuPlan,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        keys, values = self._pools[layer]
        store = placing.store if plan.slots.size <= SERIAL_ROWS else placing.store_parallel
        store(view(key), view(value), keys, values, plan.slots)
        return self._attend(plan, layer, query.float().contiguous(), scale).to(query.dtype)

    def attend_projected(
        self,
        plan: CpuPlan,
        layer: int,
        projected: torch.Tensor,
        angles: tuple[F32, F32],
        norms: F32,
        eps: float,
        scale: float,
    ) -> torch.Tensor:
        """`attend` with queries, keys and values as one product leaves them, in float32.

        Args:
            plan, layer, scale: as in `attend`.
            angles: cosines and sines.
            projected, norms, eps: see `placing.place`.

        Returns:
            [T, heads, head_dim].
        """
        keys, values = self._pools[layer]
        query = torch.empty(plan.slots.size, self._shape.heads, self._shape.head_dim)
        place = placing.place if plan.slots.size <= SERIAL_ROWS else placing.place_parallel
        place(projected.numpy(), *angles, norms, np.float32(eps), query.numpy(), keys, values, plan.slots)
        return self._attend(plan, layer, query, scale)

    def _attend(self, plan: CpuPlan, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention to what is in the pool; query: float32[T, heads, head_dim], contiguous."""
        out = torch.empty_like(query)
        keys, values = self._pools[layer]
        rows, factor, result = query.numpy(), np.float32(scale), out.numpy()
        tables = plan.tables
        if plan.tokens.size:
            tokens, owners, ends, cuts = plan.tokens, plan.owners, plan.ends, plan.cuts
            kernels.attend(rows, keys, values, tokens, owners, ends, tables, cuts, factor, result)
        if plan.items.size:
            cuts, items = plan.item_cuts, plan.items
            chunks.attend_chunks(rows, keys, values, plan.chunks, items, tables, cuts, factor, result)
        return out


def _even_cuts(cost: I32, parts: int) -> I32:
    """int32[parts + 1]: cut items 0..len(cost) into consecutive parts of about equal cost."""
    total = np.concatenate([[0], np.cumsum(cost, dtype=np.int64)])
    return np.searchsorted(total, np.linspace(0, total[-1], parts + 1)).astype(np.int32)
