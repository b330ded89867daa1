"""A measured profile: step times fitted to samples, kept as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator
from scipy.optimize import nnls

from kaiseki.core.costs import predict_ns
from kaiseki.core.decision import F64, I64
from kaiseki.core.jit import kernel
from kaiseki.core.protocols import F_DECODES, F_SLOT, F_TOKENS, N_FEATURES
from kaiseki.cost.cards import Strict
from kaiseki.cost.linear import fit as fit_linear

_FOLDS = 5
SPREAD_AT = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Quantiles at which a profile says how measured and predicted times differ."""
_LEAST_SAMPLES = 2 * N_FEATURES


class Bend(Strict):
    """A part that is flat up to a number of tokens and grows in proportion above it.

    `ns_per_token * max(tokens, at_tokens)`, of all tokens of the step: a step bound by reading
    weights costs the same until it is bound by computing.
    """

    at_tokens: PositiveFloat
    ns_per_token: PositiveFloat


class Host(Strict):
    """What a server and its clients add to the engine's own times.

    Attributes:
        step_us: to every step.
        token_us: to a step for each decode in it, whose token is detokenised, written and sent.
        request_us: from a request's arrival until the scheduler knows of it.
    """

    step_us: NonNegativeFloat = 0.0
    token_us: NonNegativeFloat = 0.0
    request_us: NonNegativeFloat = 0.0


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
        linear: ns per unit of each feature without bends, none 0: where a model starts that goes on learning.
        host: what a server adds; nothing where only the engine was measured.
        spread: measured over predicted time of steps, at the quantiles `SPREAD_AT`; empty if it is not known.
        pipeline_depth: decisions that the engine takes beyond the one it executes.
        fit_error: of `weights` and `bends`.
        samples: steps it was fitted to.
        source: what was measured, in words.
        machine: on what.
    """

    version: Literal[1] = 1
    source: str
    machine: str = ""
    weights: tuple[NonNegativeFloat, ...] = Field(min_length=N_FEATURES, max_length=N_FEATURES)
    bends: tuple[Bend, ...]
    linear: tuple[PositiveFloat, ...] = Field(min_length=N_FEATURES, max_length=N_FEATURES)
    host: Host = Host()
    spread: tuple[PositiveFloat, ...] = ()
    pipeline_depth: int = Field(default=0, ge=0, le=1)
    fit_error: FitError
    samples: PositiveInt

    @model_validator(mode="after")
    def _whole_spread(self) -> Profile:
        if self.spread and len(self.spread) != len(SPREAD_AT):
            raise ValueError(f"spread: {len(self.spread)} numbers; must be {len(SPREAD_AT)}, or none")
        return self

    def planes(self) -> F64:
        """float64[K, 2, N_FEATURES], ns per unit of feature: a step takes the sum of the maxima."""
        weights = np.array([*self.weights, *(b.ns_per_token for b in self.bends)])
        planes: F64 = _basis([b.at_tokens for b in self.bends]) * weights[:, None, None]
        planes[F_SLOT, :, F_SLOT] += self.host.step_us * 1e3
        planes[F_DECODES, :, F_DECODES] += self.host.token_us * 1e3
        return planes

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
        try:
            return cls.model_validate_json(path.read_text("utf-8"))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ValueError(f"no profile: {'; '.join(w.removeprefix(': ') for w in wrong)}") from None


class Calibrated:
    """A profile as a cost model; it learns nothing more.

    Its headroom is 1 + the profile's 90 % quantile of error.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._planes = profile.planes()

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


def calibrate(
    features: ArrayLike,
    measured_ns: ArrayLike,
    source: str,
    groups: ArrayLike | None = None,
    served: ArrayLike | None = None,
) -> Profile:
    """Fit a profile to measured steps, by non-negative least squares on the relative error.

    Args:
        features: float64[n, N_FEATURES], of `chunk_features`; n is 14 or more.
        measured_ns: float64[n], above 0.
        source: what was measured, in words.
        groups: int[n]; steps of a group are much alike, so they are left out of the fit together when its
            error is found. Without them, each step is on its own.
        served: bool[n], steps beside a server that was busy with its clients: what they took longer is
            `Host`'s, and the spread is theirs.

    Raises:
        ValueError: too few samples, other shapes, or times that are not positive.
    """
    x, y = np.asarray(features, np.float64), np.asarray(measured_ns, np.float64)
    if x.ndim != 2 or x.shape[1] != N_FEATURES or y.shape != x.shape[:1]:
        raise ValueError(f"features {x.shape} and times {y.shape}: need [n, {N_FEATURES}] and [n]")
    if len(y) < _LEAST_SAMPLES or not np.isfinite(x).all() or not (np.isfinite(y) & (y > 0)).all():
        raise ValueError(f"{len(y)} samples; need {_LEAST_SAMPLES} or more, finite, with times above 0")
    hosted = np.zeros(len(y), np.bool_) if served is None else np.asarray(served, np.bool_)
    apart = np.arange(len(y)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    bends = _bend_places(x)
    columns = np.concatenate([_columns(x, bends), x[:, [F_SLOT, F_DECODES]] * hosted[:, None]], axis=1)
    found = _fitted(columns, y)
    weights, host = found[:-2], found[-2:] / 1e3
    ratio = _held_out_ratios(columns, y, apart)
    error = np.abs(1.0 / ratio - 1)
    rates = zip(bends, weights[N_FEATURES:].tolist(), strict=True)
    return Profile(
        source=source,
        weights=tuple(weights[:N_FEATURES].tolist()),
        bends=tuple(Bend(at_tokens=at, ns_per_token=rate) for at, rate in rates if rate > 0),
        linear=tuple(fit_linear(x, y).tolist()),
        host=Host(step_us=float(host[0]), token_us=float(host[1])),
        spread=tuple(np.quantile(ratio[hosted] if hosted.any() else ratio, SPREAD_AT).tolist()),
        fit_error=FitError(
            median=float(np.median(error)), p90=float(np.quantile(error, 0.9)), max=float(error.max())
        ),
        samples=len(y),
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


def _held_out_ratios(columns: F64, y: F64, groups: I64) -> F64:
    """Measured over predicted, float64[n]: every fifth group is predicted from the others, five times."""
    ratios = np.empty(len(y))
    for fold in range(_FOLDS):
        out = groups % _FOLDS == fold
        if out.any():
            ratios[out] = y[out] / np.maximum(columns[out] @ _fitted(columns[~out], y[~out]), 1.0)
    return ratios


@kernel
def _step_ns(planes: F64, features: F64) -> float:
    """`predict_ns` for callers that are not compiled."""
    return predict_ns(planes, features)
