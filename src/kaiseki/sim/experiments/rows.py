"""What an experiment is, and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside the reported one.

    Attributes:
        metric: what it is, with its unit.
        measured: ours; None where it could not be measured.
        reported: that of the report the experiment repeats; None where it says nothing.
    """

    metric: str
    measured: float | None
    reported: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over reported."""
        if self.measured is None or not self.reported:
            return None
        return self.measured / self.reported

    def as_dict(self) -> dict[str, Any]:
        """As in the JSON of `kaiseki experiment`."""
        return {
            "metric": self.metric,
            "reported": self.reported,
            "measured": self.measured,
            "ratio": self.ratio,
        }


@dataclass(frozen=True, slots=True)
class Experiment:
    """A named experiment.

    Attributes:
        title: what it asks.
        setting: load and fleet, in words.
        differs: why our figures and the reported ones differ.
        rows: runs it, on so many requests.
        requests: how many, unless told otherwise.
    """

    title: str
    setting: str
    differs: str
    rows: Callable[[int], Iterable[Row]]
    requests: int = 300


def percent(value: float | None) -> float | None:
    """A share in per cent."""
    return None if value is None else 100.0 * value


def change(new: float | None, old: float | None) -> float | None:
    """By how many per cent `new` is above `old`."""
    return None if new is None or not old else 100.0 * (new / old - 1.0)


def over(one: float | None, other: float | None) -> float | None:
    """One over the other, where both are there."""
    return None if one is None or not other else one / other
