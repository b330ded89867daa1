"""Evaluating a cost model's planes inside compiled code: predict, differentiate, invert."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, Bool
from kaiseki.core.jit import njit
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


@njit
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


@njit
def add_decode(features: F64, context: float) -> None:
    """Add one decode that attends to `context` tokens."""
    features[F_SLOT] = 1.0
    features[F_DECODES] += 1.0
    features[F_CONTEXT] += context


@njit
def add_prefill(features: F64, start: float, tokens: float) -> None:
    """Add a prefill chunk of `tokens` that begins at position `start`; a negative `tokens` takes it back."""
    n = abs(tokens)
    sign = 1.0 if tokens > 0 else -1.0
    features[F_SLOT] = 1.0
    features[F_CHUNKS] += sign
    features[F_TOKENS] += sign * n
    features[F_PAIRS] += sign * n * (start + (n + 1.0) / 2.0)
    features[F_PREFIX] += sign * start


@njit
def gradient_ns(planes: F64, features: F64) -> F64:
    """float64[N_FEATURES]: how the prediction grows with each feature at this chunk set."""
    slope = np.zeros(planes.shape[2])
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
    return slope


@njit
def fit_prefill(planes: F64, features: F64, start: float, most: int, limit_ns: float) -> int:
    """Longest prefill chunk, at most `most` tokens, with which the set is predicted within `limit_ns`.

    Planes don't decrease in any feature, so bisection is exact.
    """
    low, high = 0, most
    trial = np.empty(N_FEATURES)
    while low < high:
        middle = (low + high + 1) // 2
        trial[:] = features
        add_prefill(trial, start, float(middle))
        if predict_ns(planes, trial) <= limit_ns:
            low = middle
        else:
            high = middle - 1
    return low


def marginal_ns(planes: F64, features: F64, decode: Bool, start: I32, chunk: I32) -> F64:
    """float64[n]: what each chunk adds to the prediction at this set's operating point, ns."""
    slope = gradient_ns(planes, features)
    pairs = chunk * (start + (chunk + 1) / 2)
    prefill = slope[F_CHUNKS] + slope[F_TOKENS] * chunk + slope[F_PAIRS] * pairs + slope[F_PREFIX] * start
    added: F64 = np.where(decode, slope[F_DECODES] + slope[F_CONTEXT] * (start + 1), prefill)
    return added


def lone_rates(planes: F64) -> tuple[float, float, float]:
    """Lower bounds for one request alone: (ns per slot, ns per prefill token, ns per decoded token).

    Attention to what came before is left out, so nothing computed from these is ever too long.
    """
    features = np.zeros(N_FEATURES)
    features[F_SLOT] = 1.0
    slot = float(predict_ns(planes, features))
    one = features.copy()
    one[F_CHUNKS], one[F_TOKENS] = 1.0, 1.0
    many = one.copy()
    many[F_TOKENS] = 1025.0
    per_token = float(predict_ns(planes, many) - predict_ns(planes, one)) / 1024.0
    features[F_DECODES] = 1.0
    return slot, per_token, float(predict_ns(planes, features))
