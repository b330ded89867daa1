"""Attention of single tokens on CPUs, as compiled loops: float32 or bfloat16 pools, float32 arithmetic.

The pool of a layer is [blocks, kv_heads, block_tokens, head_dim]: what one head reads of a block is
contiguous, and blocks are read where they are.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import prange
from numba.extending import overload

from kaiseki.core.decision import I32, I64
from kaiseki.engines.embedded.compiled import F32, Elements, exp, kernel


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
    """Make x[:n] exp(x - shift); returns the sum."""
    total = np.float32(0)
    for i in range(n):
        e = exp(x[i] - shift)
        x[i] = e
        total += e
    return total


@kernel()
def scores_of_block(query: F32, keys: Elements, count: int, scale: np.float32, out: F32) -> None:
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
def add_values_of_block(weights: F32, values: Elements, count: int, out: F32) -> None:
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
    query: F32, keys: Elements, values: Elements, head: int, table: I32, end: int, scale: np.float32, out: F32
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


@kernel(parallel=True)
def attend(
    query: F32,
    keys: Elements,
    values: Elements,
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
