"""A linear cost model that learns from measured steps."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.jit import kernel
from kaiseki.core.protocols import F_SLOT, N_FEATURES

_NOISE = 0.1
"""Standard deviation of one step's time around its expectation, relative."""
_DOUBT = 0.5
"""Standard deviation of the prior, relative to each weight."""
_DRIFT = 0.005
"""Standard deviation of how much a fully excited weight may move per step, relative."""
_SPEED_MEMORY = 0.3
"""Weight of the newest step in the running speed: what slows one step usually slows the next."""
_QUANTILE = 0.99
"""Share of steps that should stay within prediction * headroom."""
_KEPT_STEPS = 256
"""Steps over which that share is counted."""
_PLACE = int(_QUANTILE * (_KEPT_STEPS - 1))
_FIRST_HEADROOM = 1.25
_FLOOR = 1e-3
"""A weight never falls below this part of its prior, or it could not rise again."""


class OnlineLinear:
    """Step time as a non-negative linear form of the features, corrected after every step.

    Two time scales. Slowly, the weights: recursive least squares in its Kalman form (R. E. Kalman,
    1960), on relative changes; what is observed is measured / predicted - 1, and a weight's part in it
    is its share of the prediction. Both estimate and drift move only where the step's features excite
    them, so a term that did not occur keeps its value and its certainty. Weights stay positive, which
    the compiled inversion of the model relies on. Quickly, one speed factor for all of them: other
    programs, clocks and temperature slow everything at once, and for some steps in a row.

    Args:
        prior: float64[N_FEATURES], ns per unit of each feature; a zero switches the term off.
        clip: one step counts as at most this many times its prediction, and no less than its inverse.

    Raises:
        ValueError: the prior has another shape, a negative entry or no fixed cost.
    """

    def __init__(self, prior: F64, clip: float = 4.0) -> None:
        prior = np.asarray(prior, np.float64)
        if prior.shape != (N_FEATURES,) or not (prior >= 0).all() or not prior[F_SLOT] > 0:
            raise ValueError(f"prior: {prior}; needs {N_FEATURES} numbers >= 0, the first > 0")
        self._weights = prior.copy()
        self._least = prior * _FLOOR
        self._clip = clip
        self._covariance = np.eye(N_FEATURES) * _DOUBT**2
        self._speed = 1.0
        self._ratios = np.full(_KEPT_STEPS, _FIRST_HEADROOM)
        self._steps = 0
        self._headroom = _FIRST_HEADROOM
        self._spread, self._share = np.zeros((2, N_FEATURES))

    @property
    def weights(self) -> F64:
        """float64[N_FEATURES], ns per unit of feature, at ordinary speed."""
        return self._weights.copy()

    def planes(self) -> F64:
        """float64[1, 1, N_FEATURES], at the speed of recent steps."""
        return (self._weights * self._speed).reshape(1, 1, -1)

    def headroom(self) -> float:
        """99 % quantile of measured / predicted over the last 256 steps, between 1 and 2.

        Steps that have not happened yet count as 1.25, so that it starts on the safe side.
        """
        return self._headroom

    def observe(self, features: F64, measured_ns: int) -> None:
        """Correct the weights and the speed by one measured step."""
        place = self._steps % _KEPT_STEPS
        self._speed, counted = correct(
            self._weights, self._least, self._covariance, self._ratios, features,
            float(measured_ns), self._speed, self._clip, place, self._spread, self._share,
        )  # fmt: skip
        if not counted:
            return
        self._steps += 1
        self._headroom = float(min(max(np.partition(self._ratios, _PLACE)[_PLACE], 1.0), 2.0))


@kernel
def correct(
    weights: F64,
    least: F64,
    covariance: F64,
    ratios: F64,
    features: F64,
    measured_ns: float,
    speed: float,
    clip: float,
    place: int,
    spread: F64,
    share: F64,
) -> tuple[float, bool]:
    """One step of the filter, in place; the last two arrays are scratch.

    Returns the new speed, and whether the step told anything.
    """
    n = weights.size
    predicted = 0.0
    for i in range(n):
        predicted += weights[i] * features[i]
    if predicted <= 0 or measured_ns <= 0:
        return speed, False
    ratio = min(max(measured_ns / predicted, 1.0 / clip), clip)
    ratios[place] = ratio / speed
    for i in range(n):
        share[i] = weights[i] * features[i] / predicted
    excited = _NOISE**2
    for i in range(n):
        spread[i] = 0.0
        for j in range(n):
            spread[i] += covariance[i, j] * share[j]
        excited += share[i] * spread[i]
    for i in range(n):
        grown = weights[i] * max(1.0 + spread[i] / excited * (ratio - 1.0), 0.1)
        weights[i] = max(grown, least[i])
        for j in range(n):
            covariance[i, j] -= spread[i] * spread[j] / excited
        covariance[i, i] += (_DRIFT * share[i]) ** 2
    return speed + _SPEED_MEMORY * (ratio - speed), True


class FixedLinear:
    """A linear cost model that never changes; for tests and for what-if.

    Args:
        weights: float64[N_FEATURES], ns per unit of feature.
    """

    def __init__(self, weights: F64) -> None:
        self._planes = np.asarray(weights, np.float64).reshape(1, 1, -1)

    def planes(self) -> F64:
        """float64[1, 1, N_FEATURES]."""
        return self._planes

    def headroom(self) -> float:
        """Always 1."""
        return 1.0

    def observe(self, features: F64, measured_ns: int) -> None:
        """Nothing is learnt."""
