"""Paged attention on CUDA devices, by FlashInfer's paged prefill kernel.

One kernel call per layer does prefill chunks and decodes alike. FlashInfer computes in half precision,
so the model has to be loaded in bfloat16. This project's own test runs have no GPU: what is tested is
the page metadata, against a stand-in for the library that computes the same in plain Torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from kaiseki.core.decision import I32, Way
from kaiseki.engines.embedded.attention.base import PoolShape, one_way
from kaiseki.engines.embedded.batch import Batch

WORKSPACE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """`slots`: int64[T] on the device, where each token's K and V go."""

    slots: torch.Tensor


class CudaAttention:
    """An `AttentionBackend` with the pool as [blocks, block_tokens, kv_heads, head_dim] per layer."""

    def __init__(self, shape: PoolShape, device: torch.device, library: Any = None) -> None:
        """Allocate the pool on a device; `library` is FlashInfer, imported unless given.

        Raises:
            ImportError: FlashInfer is not installed.
            ValueError: the element type is not bfloat16.
        """
        if shape.dtype != torch.bfloat16:
            raise ValueError(f"attention on {device} needs bfloat16, not {shape.dtype}")
        library = library or import_module("flashinfer")
        self._shape = shape
        self._device = device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._kernel = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        size = (shape.blocks, shape.block_tokens, shape.kv_heads, shape.head_dim)
        self._keys = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self._values = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]

        self._hosts: list[torch.Tensor] = []
        if shape.host_blocks:
            host, pools = (shape.host_blocks, *size[1:]), 2 * shape.layers
            self._hosts = [torch.zeros(host, dtype=shape.dtype, pin_memory=True) for _ in range(pools)]
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def shape(self) -> PoolShape:
        """See `AttentionBackend`."""
        return self._shape

    def copy_blocks(self, copies: I32) -> None:
        """See `AttentionBackend`."""
        source, destination = torch.from_numpy(copies.astype(np.int64)).to(self._device).unbind(1)
        for pool in (*self._keys, *self._values):
            pool[destination] = pool[source]

    def swap_blocks(self, swaps: I32) -> None:
        """See `AttentionBackend`. Pinned memory and a stream of its own, which the step's waits for."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for way, source, destination in one_way(swaps):
                for pool, host in zip((*self._keys, *self._values), self._hosts, strict=True):
                    for a, b in zip(source.tolist(), destination.tolist(), strict=True):
                        if way == Way.OUT:
                            host[b].copy_(pool[a], non_blocking=True)
                        else:
                            pool[b].copy_(host[a], non_blocking=True)
        current.wait_stream(self._side)

    def plan(self, batch: Batch) -> CudaPlan:
        """See `AttentionBackend`."""
        shape = self._shape
        pages = -(-batch.ends // shape.block_tokens)
        indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        used = np.arange(batch.tables.shape[1]) < pages[:, None]
        self._kernel.plan(
            torch.from_numpy(batch.bounds),
            torch.from_numpy(indptr),
            torch.from_numpy(batch.tables[used].astype(np.int32)).to(self._device),
            torch.from_numpy((batch.ends - 1) % shape.block_tokens + 1),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_tokens,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        return CudaPlan(torch.from_numpy(batch.slots).to(self._device))

    def attend(
        self,
        plan: CudaPlan,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        keys, values = self._keys[layer], self._values[layer]
        keys.flatten(0, 1)[plan.slots] = key
        values.flatten(0, 1)[plan.slots] = value
        usual = self._shape.head_dim**-0.5  # the factor that the kernel was planned with
        scaled = query if scale == usual else query * (scale / usual)
        return torch.as_tensor(self._kernel.run(scaled.contiguous(), (keys, values)))
