"""Linear step times from measured steps: where an online model starts."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from kaiseki.core.decision import F64
from kaiseki.core.protocols import F_SLOT, N_FEATURES

GUESS_NS = np.array([1e6, 1e5, 1e5, 1e5, 1e2, 1e1, 1e1])
"""ns per unit of feature, for what was never measured."""

LEAST_SHARE = 1e-3
"""A term that the fit finds no time for keeps this part of a typical step, so that it can be learnt."""


def fit(features: F64, measured_ns: F64) -> F64:
    """Weights, all above 0, that make relative errors small: float64[N_FEATURES], ns per unit of feature."""
    if not features.size:
        return GUESS_NS.copy()
    weights, _ = nnls(features / measured_ns[:, None], np.ones(len(measured_ns)))
    typical = float(np.median(measured_ns))
    used = features.max(axis=0)
    least = np.where(used > 0, LEAST_SHARE * typical / np.maximum(used, 1.0), GUESS_NS)
    least[F_SLOT] = max(least[F_SLOT], LEAST_SHARE * typical)
    assert weights.shape == (N_FEATURES,)
    fitted: F64 = np.maximum(weights, least)
    return fitted
