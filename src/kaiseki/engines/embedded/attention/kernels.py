"""Compiled inner loops of paged attention on CPUs: float32 or bfloat16 pools, float32 arithmetic.

The pool of a layer is [blocks, kv_heads, block_tokens, head_dim]: what one head reads of a block is
contiguous, and blocks are read where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import prange
from numba.extending import overload

from kaiseki.core.decision import I32, I64

F = TypeVar("F", bound=Callable[..., object])
F32 = npt.NDArray[np.float32]
Pool = npt.NDArray[Any]

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered (to use vector registers) and multiply-adds fused; NaN and infinity still count."""
LOG2_E = np.float32(1.4426950408889634)
LEAST_EXPONENT = np.float32(-126)


def kernel(*, parallel: bool = False) -> Callable[[F], F]:
    """Compile a function on its first call, without the GIL, cached on disk."""

    def compiled(fn: F) -> F:
        return cast(F, numba.njit(parallel=parallel, fastmath=FASTMATH, nogil=True, cache=True)(fn))

    return compiled


def widen(x: Any) -> Any:
    """float32 value of a pool element: a float32, or a bfloat16 as uint16 (upper half of a float32)."""
    if isinstance(x, np.uint16):
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return x


@overload(widen, inline="always")
def _widen_typed(x: Any) -> Any:
    """Numba's version of `widen`: the choice is made by type, at compile time."""

    def from_bfloat16(x: Any) -> Any:
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

    def as_it_is(x: Any) -> Any:
        return x

    return from_bfloat16 if x == numba.types.uint16 else as_it_is


@kernel()
def exp_sum(x: F32, n: int, shift: np.float32) -> np.float32:
    """Make x[:n] exp(x - shift), to 2e-7 of the largest; returns the sum. Vectorises, unlike math.exp."""
    total = np.float32(0)
    for i in range(n):
        y = max((x[i] - shift) * LOG2_E, LEAST_EXPONENT)
        whole = np.floor(y + np.float32(0.5))
        r = y - whole
        p = np.float32(1.535336188319500e-4)
        p = p * r + np.float32(1.339887440266574e-3)
        p = p * r + np.float32(9.618437357674640e-3)
        p = p * r + np.float32(5.550332471162809e-2)
        p = p * r + np.float32(2.402264791363012e-1)
        p = p * r + np.float32(6.931472028550421e-1)
        p = p * r + np.float32(1)
        e = p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
        x[i] = e
        total += e
    return total


@kernel()
def scores_of_block(query: F32, keys: Pool, count: int, scale: np.float32, out: F32) -> None:
    """Set out[t] = scale * query . keys[t] for t < count. Four keys share each load of the query."""
    dim = query.shape[0]
    t = 0
    while t + 4 <= count:
        a = np.float32(0)
        b = np.float32(0)
        c = np.float32(0)
        d = np.float32(0)
        for i in range(dim):
            q = query[i]
            a += q * widen(keys[t, i])
            b += q * widen(keys[t + 1, i])
            c += q * widen(keys[t + 2, i])
            d += q * widen(keys[t + 3, i])
        out[t] = a * scale
        out[t + 1] = b * scale
        out[t + 2] = c * scale
        out[t + 3] = d * scale
        t += 4
    while t < count:
        a = np.float32(0)
        for i in range(dim):
            a += query[i] * widen(keys[t, i])
        out[t] = a * scale
        t += 1


@kernel()
def add_values_of_block(weights: F32, values: Pool, count: int, out: F32) -> None:
    """Add weights[t] * values[t] for t < count to `out`, four values per pass over it."""
    dim = out.shape[0]
    t = 0
    while t + 4 <= count:
        a = weights[t]
        b = weights[t + 1]
        c = weights[t + 2]
        d = weights[t + 3]
        for i in range(dim):
            out[i] += (a * widen(values[t, i]) + b * widen(values[t + 1, i])) + (
                c * widen(values[t + 2, i]) + d * widen(values[t + 3, i])
            )
        t += 4
    while t < count:
        a = weights[t]
        for i in range(dim):
            out[i] += a * widen(values[t, i])
        t += 1


@kernel()
def attend_group(
    query: F32, keys: Pool, values: Pool, head: int, table: I32, end: int, scale: np.float32, out: F32
) -> None:
    """Attention of the query heads that share one KV head to positions [0, end) of one sequence.

    query, out: [group, head_dim]; keys, values: a layer's pool; table: the sequence's block ids.
    """
    group, dim = query.shape
    block_tokens = keys.shape[2]
    weights = np.empty((group, end + block_tokens), np.float32)
    first = 0
    while first < end:
        block = table[first // block_tokens]
        count = min(block_tokens, end - first)
        for g in range(group):
            scores_of_block(query[g], keys[block, head], count, scale, weights[g, first:])
        first += block_tokens
    for g in range(group):
        most = weights[g, 0]
        for t in range(end):
            most = max(most, weights[g, t])
        inverse = np.float32(1) / exp_sum(weights[g], end, most)
        for t in range(end):
            weights[g, t] *= inverse
        for i in range(dim):
            out[g, i] = np.float32(0)
    first = 0
    while first < end:
        block = table[first // block_tokens]
        count = min(block_tokens, end - first)
        for g in range(group):
            add_values_of_block(weights[g, first:], values[block, head], count, out[g])
        first += block_tokens


@kernel()
def store_token(new_key: Pool, new_value: Pool, keys: Pool, values: Pool, slot: int) -> None:
    """Write one token's [kv_heads, head_dim] into a layer's pool."""
    block = slot // keys.shape[2]
    offset = slot % keys.shape[2]
    for h in range(keys.shape[1]):
        for d in range(keys.shape[3]):
            keys[block, h, offset, d] = new_key[h, d]
            values[block, h, offset, d] = new_value[h, d]


@kernel()
def store(new_keys: Pool, new_values: Pool, keys: Pool, values: Pool, slots: I64) -> None:
    """Write [T, kv_heads, head_dim] into a layer's pool, token i at slots[i]."""
    for i in range(slots.shape[0]):
        store_token(new_keys[i], new_values[i], keys, values, slots[i])


@kernel(parallel=True)
def store_parallel(new_keys: Pool, new_values: Pool, keys: Pool, values: Pool, slots: I64) -> None:
    """`store` on all threads; apart, since Numba's cache can't tell two compilations of one function."""
    for i in prange(slots.shape[0]):
        store_token(new_keys[i], new_values[i], keys, values, slots[i])


@kernel(parallel=True)
def attend(
    query: F32,
    keys: Pool,
    values: Pool,
    tokens: I64,
    owners: I32,
    ends: I32,
    tables: I32,
    cuts: I32,
    scale: np.float32,
    out: F32,
) -> None:
    """Attention of single tokens to their sequences in the pool.

    Args:
        query, out: [T, heads, head_dim].
        keys, values: a layer's pool.
        tokens: int64[m], which rows of query and out to compute.
        owners: int32[m], each token's row in `tables`.
        ends: int32[m], how many positions each token attends to.
        tables: int32[n, max_blocks].
        cuts: int32[parts + 1]: part p, run by one thread, does work items cuts[p] to cuts[p + 1], where
            item j is KV head j % kv_heads of token j // kv_heads.
        scale: factor on query-key products.
    """
    kv_heads = keys.shape[1]
    group = query.shape[1] // kv_heads
    for part in prange(cuts.shape[0] - 1):
        for item in range(cuts[part], cuts[part + 1]):
            j = item // kv_heads
            head = item % kv_heads
            mine = slice(head * group, (head + 1) * group)
            token = tokens[j]
            attend_group(
                query[token, mine], keys, values, head, tables[owners[j]], ends[j], scale, out[token, mine]
            )
