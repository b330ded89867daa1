"""Evaluating a cost model's planes inside compiled code: predict, differentiate, invert."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.jit import inlined, kernel, njit
from kaiseki.core.protocols import (
    F_CHUNKS,
    F_CONTEXT,
    F_DECODES,
    F_PAIRS,
    F_PREFIX,
    F_SLOT,
    F_TOKENS,
    N_FEATURES,
)


@inlined
def predict_ns(planes: F64, features: F64) -> float:
    """Predicted step time of a chunk set: sum over k of the largest planes[k, j] . features."""
    total = 0.0
    for k in range(planes.shape[0]):
        best = 0.0
        for j in range(planes.shape[1]):
            value = 0.0
            for f in range(planes.shape[2]):
                value += planes[k, j, f] * features[f]
            best = max(best, value)
        total += best
    return total


@inlined
def add_decode(features: F64, context: float) -> None:
    """Add one decode that attends to `context` tokens."""
    features[F_SLOT] = 1.0
    features[F_DECODES] += 1.0
    features[F_CONTEXT] += context


@inlined
def add_prefill(features: F64, start: float, tokens: float) -> None:
    """Add a prefill chunk of `tokens` that begins at position `start`; a negative `tokens` takes it back."""
    n = abs(tokens)
    sign = 1.0 if tokens > 0 else -1.0
    features[F_SLOT] = 1.0
    features[F_CHUNKS] += sign
    features[F_TOKENS] += sign * n
    features[F_PAIRS] += sign * n * (start + (n + 1.0) / 2.0)
    features[F_PREFIX] += sign * start


@kernel
def gradient_ns(planes: F64, features: F64, slope: F64) -> None:
    """Set slope[f] (float64[N_FEATURES]) to how the prediction grows with each feature at this chunk set."""
    slope[:] = 0.0
    for k in range(planes.shape[0]):
        best, chosen = -1.0, 0
        for j in range(planes.shape[1]):
            value = 0.0
            for f in range(planes.shape[2]):
                value += planes[k, j, f] * features[f]
            if value > best:
                best, chosen = value, j
        for f in range(planes.shape[2]):
            slope[f] += planes[k, chosen, f]


@inlined
def share_ns(slope: F64, decode: bool, start: int, chunk: int) -> float:
    """What one chunk adds to the prediction at the operating point that `slope` belongs to, ns."""
    if decode:
        return float(slope[F_DECODES] + slope[F_CONTEXT] * (start + 1))
    pairs = chunk * (start + (chunk + 1) / 2)
    added = slope[F_CHUNKS] + slope[F_TOKENS] * chunk + slope[F_PAIRS] * pairs + slope[F_PREFIX] * start
    return float(added)


@kernel
def fit_prefill(planes: F64, features: F64, trial: F64, start: float, most: int, limit_ns: float) -> int:
    """Longest prefill chunk, at most `most` tokens, with which the set is predicted within `limit_ns`.

    Planes don't decrease in any feature, so bisection is exact. `trial` is scratch, float64[N_FEATURES].
    """
    low, high = 0, most
    while low < high:
        # The whole first, as it often fits.
        middle = high if high == most else (low + high + 1) // 2
        for f in range(features.size):
            trial[f] = features[f]
        add_prefill(trial, start, float(middle))
        if predict_ns(planes, trial) <= limit_ns:
            low = middle
        else:
            high = middle - 1
    return low


@njit
def lone_rates(planes: F64) -> tuple[float, float, float]:
    """Lower bounds for one request alone: (ns per slot, ns per prefill token, ns per decoded token).

    Attention to what came before is left out, so nothing computed from these is ever too long.
    """
    features = np.zeros(N_FEATURES)
    features[F_SLOT] = 1.0
    slot = predict_ns(planes, features)
    features[F_DECODES] = 1.0
    decode = predict_ns(planes, features)
    features[F_DECODES] = 0.0
    features[F_CHUNKS], features[F_TOKENS] = 1.0, 1.0
    one = predict_ns(planes, features)
    features[F_TOKENS] = 1025.0
    per_token = (predict_ns(planes, features) - one) / 1024.0
    return slot, per_token, decode
