"""New K and V on their way into the pool on CPUs, as compiled loops."""

from __future__ import annotations

import numpy as np
from numba import prange

from kaiseki.core.decision import I64
from kaiseki.engines.embedded.compiled import F32, Elements, kernel


@kernel()
def store_token(new_key: Elements, new_value: Elements, keys: Elements, values: Elements, slot: int) -> None:
    """Write one token's [kv_heads, head_dim] into a layer's pool."""
    block = slot // keys.shape[2]
    offset = slot % keys.shape[2]
    for h in range(keys.shape[1]):
        for d in range(keys.shape[3]):
            keys[block, h, offset, d] = new_key[h, d]
            values[block, h, offset, d] = new_value[h, d]


@kernel()
def store(new_keys: Elements, new_values: Elements, keys: Elements, values: Elements, slots: I64) -> None:
    """Write [T, kv_heads, head_dim] into a layer's pool, token i at slots[i]."""
    for i in range(slots.shape[0]):
        store_token(new_keys[i], new_values[i], keys, values, slots[i])


@kernel(parallel=True)
def store_parallel(
    new_keys: Elements, new_values: Elements, keys: Elements, values: Elements, slots: I64
) -> None:
    """`store` on all threads; apart, since Numba's cache can't tell two compilations of one function."""
    for i in prange(slots.shape[0]):
        store_token(new_keys[i], new_values[i], keys, values, slots[i])


@kernel()
def normalise(x: F32, weight: F32, eps: np.float32, out: F32) -> None:
    """Set `out` to x / sqrt(mean(x^2) + eps) * weight, all float32[size]; `out` may be x."""
    squares = np.float32(0)
    for i in range(x.shape[0]):
        squares += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(squares / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * weight[i]


@kernel()
def rotate(x: F32, cos: F32, sin: F32, out: F32) -> None:
    """Set `out` to x turned by a position's angles; x, cos, sin, out: [head_dim]."""
    half = x.shape[0] // 2
    for i in range(half):
        out[i] = x[i] * cos[i] - x[half + i] * sin[i]
        out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i]


@kernel()
def place_token(
    projected: F32,
    cos: F32,
    sin: F32,
    norms: F32,
    eps: np.float32,
    query: F32,
    keys: F32,
    values: F32,
    slot: int,
) -> None:
    """One token of `place`: arrays without their first axis."""
    heads, kv_heads = query.shape[0], keys.shape[1]
    block, offset = slot // keys.shape[2], slot % keys.shape[2]
    for h in range(heads + kv_heads):
        x = projected[h]
        out = query[h] if h < heads else keys[block, h - heads, offset]
        if norms.shape[0]:
            normalise(x, norms[0 if h < heads else 1], eps, x)
        if cos.size:
            rotate(x, cos, sin, out)
        else:
            out[:] = x
    for h in range(kv_heads):
        values[block, h, offset, :] = projected[heads + kv_heads + h]


@kernel()
def place(
    projected: F32,
    cos: F32,
    sin: F32,
    norms: F32,
    eps: np.float32,
    query: F32,
    keys: F32,
    values: F32,
    slots: I64,
) -> None:
    """Take apart the joint product of a float32 attention layer; K and V go into the pool.

    Args:
        projected: [T, heads + 2 * kv_heads, head_dim]: queries, keys, values. Changed if there are norms.
        cos, sin: [T, head_dim], of the angles of rotary embeddings; [T, 0] for none.
        norms: [2, head_dim], weights of RMS norms on each query and key; [0, head_dim] for none.
        eps: of the norms.
        query: [T, heads, head_dim], set.
        keys, values: a layer's pool.
        slots: int64[T], where each token goes.
    """
    for i in range(slots.shape[0]):
        place_token(projected[i], cos[i], sin[i], norms, eps, query[i], keys, values, slots[i])


@kernel(parallel=True)
def place_parallel(
    projected: F32,
    cos: F32,
    sin: F32,
    norms: F32,
    eps: np.float32,
    query: F32,
    keys: F32,
    values: F32,
    slots: I64,
) -> None:
    """`place` on all threads."""
    for i in prange(slots.shape[0]):
        place_token(projected[i], cos[i], sin[i], norms, eps, query[i], keys, values, slots[i])


@kernel()
def rms_norm(x: F32, weight: F32, eps: np.float32, out: F32) -> None:
    """`normalise` each row; x, out: [n, size]."""
    for i in range(x.shape[0]):
        normalise(x[i], weight, eps, out[i])


@kernel(parallel=True)
def rms_norm_parallel(x: F32, weight: F32, eps: np.float32, out: F32) -> None:
    """`rms_norm` on all threads."""
    for i in prange(x.shape[0]):
        normalise(x[i], weight, eps, out[i])
