"""Paged attention against attention over the whole sequence, backend by backend."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kaiseki.engines.embedded.attention import AttentionBackend, PoolShape
from kaiseki.engines.embedded.attention.cpu import CpuAttention
from kaiseki.engines.embedded.attention.cuda import CudaAttention
from kaiseki.engines.embedded.attention.kernels import exp_sum
from kaiseki.engines.embedded.batch import lay_out

PAGE = 4
HEADS, KV_HEADS, DIM = 6, 2, 8
SCALE = 0.3


class StandInForFlashInfer:
    """FlashInfer's paged prefill as its documentation has it, in plain Torch."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, queries: Any, pages: Any, indices: Any, last: Any, *sizes: int, **options: Any) -> None:
        self.plan_, self.sizes = (queries.tolist(), pages.tolist(), indices.long(), last.tolist()), sizes
        assert options["causal"]

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        queries, pages, indices, last = self.plan_
        out = []
        for i, left in enumerate(last):
            own = indices[pages[i] : pages[i + 1]]
            length = (len(own) - 1) * PAGE + left
            key, value = (pool[own].flatten(0, 1)[:length] for pool in cache)
            out.append(whole(query[queries[i] : queries[i + 1]], key, value, DIM**-0.5))
        return torch.cat(out)


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of a sequence's last tokens: [n, heads, dim] and [length, kv_heads, dim]."""
    n, length = query.shape[0], key.shape[0]
    mask = torch.arange(length) <= torch.arange(length - n, length).unsqueeze(1)
    q, k, v = (t.transpose(0, 1).float() for t in (query, key, value))
    group = query.shape[1] // key.shape[1]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1).to(query.dtype)


def backend_of(kind: str) -> AttentionBackend:
    dtype = torch.float32 if kind == "cpu float32" else torch.bfloat16
    shape = PoolShape(2, 64, PAGE, HEADS, KV_HEADS, DIM, dtype)
    if kind == "cuda":
        library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandInForFlashInfer)
        return CudaAttention(shape, torch.device("cpu"), library)
    return CpuAttention(shape, threads=1)


@pytest.fixture(params=["cpu float32", "cpu bfloat16", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    yield backend_of(request.param)


def test_random_chunks_attend_to_their_own_sequence(backend: AttentionBackend) -> None:
    rng, dtype = np.random.default_rng(0), backend.shape.dtype
    torch.manual_seed(0)
    lengths = [1, 4, 17, 30, 32]
    tables = rng.permutation(64)[:40].reshape(5, 8).astype(np.int32)
    qkv = [[torch.randn(n, h, DIM).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS)] for n in lengths]
    done = [0] * 5
    while done != lengths:
        picked = [i for i in range(5) if done[i] < lengths[i] and rng.random() < 0.7]
        if not picked:
            continue
        sizes = [int(rng.integers(1, min(9, lengths[i] - done[i]) + 1)) for i in picked]
        starts = np.array([done[i] for i in picked], np.int32)
        chunks = [np.zeros(n, np.int32) for n in sizes]
        plan = backend.plan(lay_out(chunks, starts, tables[picked], [True] * len(picked), PAGE))
        pieces = [
            torch.cat([qkv[i][part][done[i] : done[i] + n] for i, n in zip(picked, sizes, strict=True)])
            for part in range(3)
        ]
        for layer in range(2):
            factor = 1 + layer
            out = backend.attend(plan, layer, pieces[0], pieces[1], pieces[2] * factor, SCALE)
            first = 0
            for i, n in zip(picked, sizes, strict=True):
                end = done[i] + n
                query, key, value = qkv[i][0][done[i] : end], qkv[i][1][:end], qkv[i][2][:end] * factor
                assert torch.allclose(
                    out[first : first + n].float(),
                    whole(query, key, value, SCALE).float(),
                    atol=2e-5 if dtype == torch.float32 else 5e-2,
                )
                first += n
        for i, n in zip(picked, sizes, strict=True):
            done[i] += n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 8), (3, 3, 24), (8, 1, 16)])
def test_long_chunks_beside_each_other(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Chunks of 40, 5 and 1 tokens after prefixes of 100, 0 and 50, shared by two threads."""
    torch.manual_seed(2)
    backend = CpuAttention(PoolShape(1, 64, PAGE, heads, kv_heads, dim, dtype), threads=2)
    blocks = np.random.default_rng(1).permutation(64).astype(np.int32)
    tables = np.stack([np.resize(part, 35) for part in np.split(blocks, [35, 37])])
    sizes, starts = [40, 5, 1], [100, 0, 50]
    parts = [
        [torch.randn(start + n, h, dim).to(dtype) for h in (heads, kv_heads, kv_heads)]
        for n, start in zip(sizes, starts, strict=True)
    ]
    for i, start in enumerate(starts):
        if start:
            batch = lay_out(
                [np.zeros(start, np.int32)], np.zeros(1, np.int32), tables[i : i + 1], [True], PAGE
            )
            backend.attend(backend.plan(batch), 0, *(part[:start] for part in parts[i]), SCALE)
    batch = lay_out(
        [np.zeros(n, np.int32) for n in sizes], np.array(starts, np.int32), tables, [True] * 3, PAGE
    )
    new = [torch.cat([parts[i][k][start:] for i, start in enumerate(starts)]) for k in range(3)]
    out = backend.attend(backend.plan(batch), 0, new[0], new[1], new[2], SCALE).split(sizes)
    for got, (query, key, value), start in zip(out, parts, starts, strict=True):
        expected = whole(query[start:], key, value, SCALE).float()
        assert torch.allclose(got.float(), expected, atol=2e-5 if dtype == torch.float32 else 5e-2)


def test_copied_blocks_hold_the_same(backend: AttentionBackend) -> None:
    torch.manual_seed(1)
    dtype = backend.shape.dtype
    query, key, value = (torch.randn(4, h, DIM).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    chunk, start = [np.zeros(4, np.int32)], np.zeros(1, np.int32)
    plan = backend.plan(lay_out(chunk, start, np.array([[3]], np.int32), [True], PAGE))
    expected = backend.attend(plan, 0, query, key, value, SCALE)[-1]
    backend.copy_blocks(np.array([[3, 9]], np.int32))
    last, at = [np.zeros(1, np.int32)], np.array([3], np.int32)
    plan = backend.plan(lay_out(last, at, np.array([[9]], np.int32), [True], PAGE))
    again = backend.attend(plan, 0, query[3:], key[3:], value[3:], SCALE)[0]
    assert torch.allclose(again.float(), expected.float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_the_vectorised_exponential_is_exact_enough() -> None:
    x = np.linspace(-87, 0, 20001).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    total = exp_sum(ours := x.copy(), x.size, np.float32(0))
    assert np.abs(ours - expected).max() < 2e-7
    assert np.abs(ours / expected - 1).max() < 6e-6
    assert total == pytest.approx(expected.sum(), rel=1e-6)
    far = np.array([-1e30, -200.0], np.float32)
    exp_sum(far, 2, np.float32(0))
    assert (far < 1e-37).all()


def test_a_gpu_needs_bfloat16() -> None:
    shape = PoolShape(1, 4, PAGE, HEADS, KV_HEADS, DIM, torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        CudaAttention(shape, torch.device("cpu"), SimpleNamespace())
