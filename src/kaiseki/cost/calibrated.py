"""A measured profile: step times fitted to samples, kept as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from scipy.optimize import nnls

from kaiseki.core.costs import predict_ns
from kaiseki.core.decision import F64
from kaiseki.core.jit import kernel
from kaiseki.core.protocols import F_DECODES, F_SLOT, F_TOKENS, N_FEATURES
from kaiseki.cost.cards import Strict

_FOLDS = 5
_LEAST_SAMPLES = 2 * N_FEATURES


class Bend(Strict):
    """A part that is flat up to a number of tokens and grows in proportion above it.

    `ns_per_token * max(tokens, at_tokens)`, of all tokens of the step: a step bound by reading
    weights costs the same until it is bound by computing.
    """

    at_tokens: PositiveFloat
    ns_per_token: PositiveFloat


class FitError(Strict):
    """Relative error of steps that were left out of the fit (five-fold): quantiles of its size."""

    median: NonNegativeFloat
    p90: NonNegativeFloat
    max: NonNegativeFloat


class Profile(Strict):
    """What was measured of one machine, engine and model.

    Attributes:
        version: of this format.
        weights: ns per unit of each feature, in the order of `kaiseki.core.protocols.FEATURES`.
        bends: the parts that are not linear.
        samples: steps it was fitted to.
        source: what was measured, in words.
    """

    version: Literal[1] = 1
    weights: tuple[NonNegativeFloat, ...] = Field(min_length=N_FEATURES, max_length=N_FEATURES)
    bends: tuple[Bend, ...]
    fit_error: FitError
    samples: PositiveInt
    source: str

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(self.model_dump_json(indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such profile; the message names what is wrong.
        """
        return cls.model_validate_json(path.read_text("utf-8"))


class Calibrated:
    """A profile as a cost model; it learns nothing more.

    Its headroom is 1 + the profile's 90 % quantile of error.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        bends = [(b.at_tokens, b.ns_per_token) for b in profile.bends]
        weights = np.array([*profile.weights, *(rate for _, rate in bends)])
        self._planes: F64 = _basis([at for at, _ in bends]) * weights[:, None, None]

    def planes(self) -> F64:
        """float64[K, 2, N_FEATURES], ns per unit of feature."""
        return self._planes

    def headroom(self) -> float:
        return 1.0 + self.profile.fit_error.p90

    def observe(self, features: F64, measured_ns: int) -> None:
        """Nothing is learnt."""

    def iteration_ns(self, features: F64) -> float:
        """Predicted time of a step, ns. float64[N_FEATURES]."""
        return float(_step_ns(self._planes, features))


def calibrate(features: ArrayLike, measured_ns: ArrayLike, source: str) -> Profile:
    """Fit a profile to measured steps, by non-negative least squares on the relative error.

    Args:
        features: float64[n, N_FEATURES], of `chunk_features`; n is 14 or more.
        measured_ns: float64[n], above 0.
        source: what was measured, in words.

    Raises:
        ValueError: too few samples, other shapes, or times that are not positive.
    """
    x, y = np.asarray(features, np.float64), np.asarray(measured_ns, np.float64)
    if x.ndim != 2 or x.shape[1] != N_FEATURES or y.shape != x.shape[:1]:
        raise ValueError(f"features {x.shape} and times {y.shape}: need [n, {N_FEATURES}] and [n]")
    if len(y) < _LEAST_SAMPLES or not np.isfinite(x).all() or not (np.isfinite(y) & (y > 0)).all():
        raise ValueError(f"{len(y)} samples; need {_LEAST_SAMPLES} or more, finite, with times above 0")
    bends = _bend_places(x)
    columns = _columns(x, bends)
    weights = _fitted(columns, y)
    rates = zip(bends, weights[N_FEATURES:].tolist(), strict=True)
    return Profile(
        weights=tuple(weights[:N_FEATURES].tolist()),
        bends=tuple(Bend(at_tokens=at, ns_per_token=rate) for at, rate in rates if rate > 0),
        fit_error=_held_out_error(columns, y),
        samples=len(y),
        source=source,
    )


def _bend_places(x: F64) -> list[float]:
    """Powers of two inside the range of step sizes that was measured."""
    tokens = x[:, F_DECODES] + x[:, F_TOKENS]
    low, high = np.log2(np.maximum([tokens.min(), tokens.max()], 1.0))
    return [float(2**p) for p in range(int(low) + 1, int(np.ceil(high)))]


def _basis(bends: list[float]) -> F64:
    """float64[N_FEATURES + bends, 2, N_FEATURES]: every feature alone, then each bend as two planes."""
    basis = np.zeros((N_FEATURES + len(bends), 2, N_FEATURES))
    for f in range(N_FEATURES):
        basis[f, :, f] = 1.0
    for k, at in enumerate(bends, N_FEATURES):
        basis[k, 0, [F_DECODES, F_TOKENS]] = 1.0
        basis[k, 1, F_SLOT] = at
    return basis


def _columns(x: F64, bends: list[float]) -> F64:
    """float64[n, N_FEATURES + bends]: the value of each part at unit weight."""
    values: F64 = np.einsum("nf,kjf->nkj", x, _basis(bends)).max(2)
    return values


def _fitted(columns: F64, y: F64) -> F64:
    """Weights >= 0 that minimise the sum of (fitted / measured - 1) squared."""
    relative = columns / y[:, None]
    scale = np.maximum(relative.max(0), np.finfo(float).tiny)
    found, _ = nnls(relative / scale, np.ones(len(y)))
    return np.asarray(found / scale, np.float64)


def _held_out_error(columns: F64, y: F64) -> FitError:
    """Every fifth sample is predicted from the others, five times."""
    errors = np.empty(len(y))
    for fold in range(_FOLDS):
        out = np.arange(len(y)) % _FOLDS == fold
        errors[out] = np.abs(columns[out] @ _fitted(columns[~out], y[~out]) / y[out] - 1)
    median, p90 = np.quantile(errors, [0.5, 0.9])
    return FitError(median=float(median), p90=float(p90), max=float(errors.max()))


@kernel
def _step_ns(planes: F64, features: F64) -> float:
    """`predict_ns` for callers that are not compiled."""
    return predict_ns(planes, features)
