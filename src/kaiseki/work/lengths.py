"""How long prompts and outputs are: distributions to draw from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kaiseki.work.batches import F64, I32, MAX_TOKENS

LEAST_MASS = 0.01
"""Least share of a distribution that must be inside its bounds, or drawing from it would take for ever."""


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, rng: np.random.Generator, n: int) -> I32:
        """int32[n], each from 1 to `MAX_TOKENS`."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal, truncated to [low, high] and rounded.

    Attributes:
        median_tokens: of the distribution before it is truncated.
        sigma: standard deviation of the logarithm.
        low: least length, >= 1.
        high: greatest length, <= `MAX_TOKENS`.

    Raises:
        ValueError: a value is out of its range, or hardly any draw would be inside the bounds.
    """

    median_tokens: float
    sigma: float
    low: int = 1
    high: int = MAX_TOKENS

    def __post_init__(self) -> None:
        if not (0 < self.median_tokens < math.inf and 0 < self.sigma < math.inf):
            raise ValueError(f"median_tokens and sigma must be positive, got {self}")
        if not 1 <= self.low <= self.high <= MAX_TOKENS:
            raise ValueError(f"1 <= low <= high <= {MAX_TOKENS} must hold, got {self}")
        if self._below(self.high + 0.5) - self._below(self.low - 0.5) < LEAST_MASS:
            raise ValueError(f"less than {LEAST_MASS:.0%} of the distribution is inside its bounds: {self}")

    def draw(self, rng: np.random.Generator, n: int) -> I32:
        tokens = np.zeros(n)
        todo = np.arange(n)
        while len(todo):
            tokens[todo] = np.rint(rng.lognormal(math.log(self.median_tokens), self.sigma, len(todo)))
            drawn = tokens[todo]
            todo = todo[(drawn < self.low) | (drawn > self.high)]
        return tokens.astype(np.int32)

    def _below(self, tokens: float) -> float:
        """Share of the distribution below a length."""
        return 0.5 * (1 + math.erf(math.log(tokens / self.median_tokens) / (self.sigma * math.sqrt(2))))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """What was measured: values at given probabilities, straight lines between.

    Attributes:
        probabilities: ascending from 0 to 1.
        values: ascending, as many; rounded when drawn as lengths.

    Raises:
        ValueError: the table is not like that.
    """

    probabilities: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        p, v = np.array(self.probabilities), np.array(self.values)
        if len(p) != len(v) or len(p) < 2 or p[0] != 0 or p[-1] != 1 or not (np.diff(p) > 0).all():
            raise ValueError("a quantile table has as many values as probabilities, which rise from 0 to 1")
        if not (np.isfinite(v).all() and (np.diff(v) >= 0).all()):
            raise ValueError("the values of a quantile table are finite and ascending")

    def sample(self, rng: np.random.Generator, n: int) -> F64:
        """float64[n] in the unit of the values."""
        return np.interp(rng.random(n), self.probabilities, self.values)

    def draw(self, rng: np.random.Generator, n: int) -> I32:
        return np.clip(np.rint(self.sample(rng, n)), 1, MAX_TOKENS).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A share of long ones among others, such as a long tail of 8 %.

    Attributes:
        body: what most are like.
        tail: what the rest is like.
        tail_share: how many are of the tail, 0 to 1.

    Raises:
        ValueError: tail_share is no share.
    """

    body: Lengths
    tail: Lengths
    tail_share: float

    def __post_init__(self) -> None:
        if not 0 <= self.tail_share <= 1:
            raise ValueError(f"tail_share must be between 0 and 1, got {self.tail_share}")

    def draw(self, rng: np.random.Generator, n: int) -> I32:
        of_tail = rng.random(n) < self.tail_share
        return np.where(of_tail, self.tail.draw(rng, n), self.body.draw(rng, n))
