"""When requests come: endless streams of arrival times in ascending order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kaiseki.work.batches import BATCH_ROWS, I64

DAY_S = 86_400.0
STEPS_PER_PERIOD = 288
"""A day's curve in steps of five minutes."""


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def mean_rps(self) -> float:
        """Requests per second in the long run."""
        ...

    def times_ns(self, rng: np.random.Generator) -> Iterator[I64]:
        """Arrival times since the start in ascending order, for ever, in arrays of `BATCH_ROWS`."""
        ...


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gaps of a gamma distribution; with a coefficient of variation of 1 they are Poisson.

    Attributes:
        mean_rps: requests per second.
        cv: standard deviation of the gaps over their mean; above 1 they come in clumps.

    Raises:
        ValueError: a value is not positive.
    """

    mean_rps: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _positive(mean_rps=self.mean_rps, cv=self.cv)

    def times_ns(self, rng: np.random.Generator) -> Iterator[I64]:
        shape = self.cv**-2
        scale_ns = 1e9 / (self.mean_rps * shape)
        last_ns = np.int64(0)
        while True:
            gaps_ns = np.rint(rng.gamma(shape, scale_ns, BATCH_ROWS)).astype(np.int64)
            times_ns = last_ns + np.cumsum(gaps_ns)
            last_ns = times_ns[-1]
            yield times_ns


def poisson(mean_rps: float) -> Gamma:
    """Arrivals that know nothing of each other."""
    return Gamma(mean_rps)


@dataclass(frozen=True, slots=True)
class Profile:
    """Poisson arrivals whose rate changes step by step, over and over.

    Attributes:
        rates_rps: requests per second in each step.
        step_s: length of a step.

    Raises:
        ValueError: a rate is negative, all are 0, or the step is not positive.
    """

    rates_rps: tuple[float, ...]
    step_s: float

    def __post_init__(self) -> None:
        _positive(step_s=self.step_s)
        if not all(0 <= rate < math.inf for rate in self.rates_rps) or not any(self.rates_rps):
            raise ValueError("rates_rps must be numbers >= 0, not all 0")

    @property
    def mean_rps(self) -> float:
        return sum(self.rates_rps) / len(self.rates_rps)

    def times_ns(self, rng: np.random.Generator) -> Iterator[I64]:
        return even_chunks(_poisson_in(rng, self._segments()))

    def _segments(self) -> Iterator[tuple[float, float]]:
        while True:
            for rate in self.rates_rps:
                yield self.step_s, rate

    def scaled_to(self, mean_rps: float) -> Profile:
        """The same curve at another mean."""
        factor = mean_rps / self.mean_rps
        return Profile(tuple(rate * factor for rate in self.rates_rps), self.step_s)


def diurnal(mean_rps: float, peak_over_mean: float = 1.6, period_s: float = DAY_S) -> Profile:
    """A sine over the day that starts at its mean and rises.

    Args:
        mean_rps: requests per second over a whole period.
        peak_over_mean: highest rate over the mean, 1 to 2 (then the lowest rate is 0).
        period_s: length of a day.

    Raises:
        ValueError: a value is out of its range.
    """
    _positive(mean_rps=mean_rps, period_s=period_s)
    if not 1 <= peak_over_mean <= 2:
        raise ValueError(f"peak_over_mean must be between 1 and 2, got {peak_over_mean}")
    middles = (np.arange(STEPS_PER_PERIOD) + 0.5) / STEPS_PER_PERIOD
    rates = mean_rps * (1 + (peak_over_mean - 1) * np.sin(2 * np.pi * middles))
    return Profile(tuple(rates.tolist()), period_s / STEPS_PER_PERIOD)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Bursts: a Poisson rate while on, another while off; how long each lasts is exponential.

    Attributes:
        on_rps: rate of a burst.
        off_rps: rate between bursts, may be 0.
        mean_on_s: mean length of a burst.
        mean_off_s: mean length between bursts.

    Raises:
        ValueError: a value is out of its range.
    """

    on_rps: float
    off_rps: float
    mean_on_s: float
    mean_off_s: float

    def __post_init__(self) -> None:
        _positive(on_rps=self.on_rps, mean_on_s=self.mean_on_s, mean_off_s=self.mean_off_s)
        if not 0 <= self.off_rps < math.inf:
            raise ValueError(f"off_rps must be a number >= 0, got {self.off_rps}")

    @property
    def mean_rps(self) -> float:
        requests = self.on_rps * self.mean_on_s + self.off_rps * self.mean_off_s
        return requests / (self.mean_on_s + self.mean_off_s)

    def times_ns(self, rng: np.random.Generator) -> Iterator[I64]:
        return even_chunks(_poisson_in(rng, self._segments(rng)))

    def _segments(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        while True:
            yield rng.exponential(self.mean_off_s), self.off_rps
            yield rng.exponential(self.mean_on_s), self.on_rps


def even_chunks(parts: Iterable[I64]) -> Iterator[I64]:
    """The same numbers in arrays of `BATCH_ROWS`; of a stream that ends, the last one is shorter."""
    held: list[I64] = []
    count = 0
    for part in parts:
        held.append(part)
        count += len(part)
        if count >= BATCH_ROWS:
            joined = np.concatenate(held)
            whole = count - count % BATCH_ROWS
            yield from joined[:whole].reshape(-1, BATCH_ROWS)
            held, count = [joined[whole:]], count - whole
    if count:
        yield np.concatenate(held)


def _poisson_in(rng: np.random.Generator, segments: Iterable[tuple[float, float]]) -> Iterator[I64]:
    """Arrival times, nanoseconds, in consecutive segments of (seconds, requests per second)."""
    start_ns = 0
    for length_s, rate_rps in segments:
        pieces = max(1, math.ceil(length_s * rate_rps / BATCH_ROWS))  # a long segment is no long array
        length_ns = round(length_s * 1e9 / pieces)
        for _ in range(pieces):
            count = rng.poisson(rate_rps * length_ns * 1e-9)
            if count:
                yield start_ns + (length_ns * np.sort(rng.random(count))).astype(np.int64)
            start_ns += length_ns


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value}")
