"""Paged attention on CPUs.

Single tokens (decodes, and chunks of a few tokens) go through compiled loops that read KV blocks in
place. Longer chunks compute enough per byte that gathering their blocks once and using Torch's
blocked attention is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from kaiseki.core.decision import I32, I64
from kaiseki.engines.embedded.attention import kernels
from kaiseki.engines.embedded.attention.base import PoolShape
from kaiseki.engines.embedded.batch import Batch

SHORT_CHUNK = 4
"""Chunks up to this many tokens are attended token by token."""
SERIAL_TOKENS = 16
"""Up to this many tokens, waking other threads takes longer than writing all K and V on one."""


@dataclass(frozen=True, slots=True)
class LongChunk:
    """A chunk for blocked attention: tokens [first, last) of the forward, `start` tokens before them.

    `blocks`: int64[blocks that cover the sequence]; `mask`: float32[n, start + n] added to scores, None
    when the chunk begins its sequence and plain causal attention does.
    """

    first: int
    last: int
    start: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Work of one forward, the same for every layer; see `kernels.attend` for the arrays."""

    slots: I64
    tokens: I64
    owners: I32
    ends: I32
    tables: I32
    cuts: I32
    long: tuple[LongChunk, ...]


class CpuAttention:
    """An `AttentionBackend` on Torch CPU tensors, seen by compiled kernels as NumPy arrays."""

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
        self._keys = [_pool(size, shape.dtype) for _ in range(shape.layers)]
        self._values = [_pool(size, shape.dtype) for _ in range(shape.layers)]
        self._views = [(_view(k), _view(v)) for k, v in zip(self._keys, self._values, strict=True)]

    @property
    def shape(self) -> PoolShape:
        """See `AttentionBackend`."""
        return self._shape

    def copy_blocks(self, copies: I32) -> None:
        """See `AttentionBackend`."""
        source, destination = copies[:, 0], copies[:, 1]
        for keys, values in self._views:
            keys[destination] = keys[source]
            values[destination] = values[source]

    def plan(self, batch: Batch) -> CpuPlan:
        """See `AttentionBackend`."""
        lengths = batch.lengths
        short = np.flatnonzero(lengths <= SHORT_CHUNK).astype(np.int32)
        owners = np.repeat(short, lengths[short])
        last = np.cumsum(lengths[short])
        within = np.arange(owners.size) - np.repeat(last - lengths[short], lengths[short])
        tokens = batch.bounds[owners] + within
        ends = (batch.positions[tokens] + 1).astype(np.int32)
        return CpuPlan(
            slots=batch.slots,
            tokens=tokens.astype(np.int64),
            owners=owners,
            ends=ends,
            tables=batch.tables,
            cuts=_even_cuts(np.repeat(ends, self._shape.kv_heads), self._threads),
            long=tuple(self._long_chunk(batch, int(i)) for i in np.flatnonzero(lengths > SHORT_CHUNK)),
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
        keys, values = self._views[layer]
        store = kernels.store if plan.slots.size <= SERIAL_TOKENS else kernels.store_parallel
        store(_view(key), _view(value), keys, values, plan.slots)
        wide = query.float().contiguous()
        out = torch.empty_like(wide)
        if plan.tokens.size:
            kernels.attend(
                wide.numpy(),
                keys,
                values,
                plan.tokens,
                plan.owners,
                plan.ends,
                plan.tables,
                plan.cuts,
                np.float32(scale),
                out.numpy(),
            )
        result = out.to(query.dtype)
        for chunk in plan.long:
            mine = slice(chunk.first, chunk.last)
            result[mine] = self._blocked(chunk, layer, query[mine], key[mine], value[mine], scale)
        return result

    def _long_chunk(self, batch: Batch, i: int) -> LongChunk:
        first, last, end = int(batch.bounds[i]), int(batch.bounds[i + 1]), int(batch.ends[i])
        start = end - (last - first)
        blocks = batch.tables[i, : -(-end // self._shape.block_tokens)].astype(np.int64)
        mask = None
        if start:
            future = torch.arange(end) > torch.arange(start, end).unsqueeze(1)
            mask = torch.zeros(last - first, end, dtype=self._shape.dtype).masked_fill_(future, float("-inf"))
        return LongChunk(first, last, start, torch.from_numpy(blocks), mask)

    def _blocked(
        self,
        chunk: LongChunk,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one long chunk: [n, heads, head_dim] of query, its own K and V, and the pool."""
        if chunk.start:
            end = chunk.start + query.shape[0]
            key = self._gather(self._keys[layer], chunk.blocks, end)
            value = self._gather(self._values[layer], chunk.blocks, end)
        else:
            key, value = key.transpose(0, 1), value.transpose(0, 1)
        out = scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _gather(self, pool: torch.Tensor, blocks: torch.Tensor, end: int) -> torch.Tensor:
        """[kv_heads, end, head_dim] of one sequence, contiguous per head."""
        shape = self._shape
        found = pool.index_select(0, blocks).transpose(0, 1)
        return found.reshape(shape.kv_heads, -1, shape.head_dim)[:, :end]


def _pool(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in memory from NumPy, which asks for huge pages: blocks are read in any order."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(np.zeros(size, np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.zeros(size, np.float32))


def _view(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """A NumPy view for the kernels; bfloat16 shows as uint16."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _even_cuts(cost: I32, parts: int) -> I32:
    """int32[parts + 1]: cut items 0..len(cost) into consecutive parts of about equal cost."""
    total = np.concatenate([[0], np.cumsum(cost, dtype=np.int64)])
    return np.searchsorted(total, np.linspace(0, total[-1], parts + 1)).astype(np.int32)
