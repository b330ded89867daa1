"""What the rules look at, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kaiseki.observe.doctor.readings import Readings

DEFAULT_TTFT_S, DEFAULT_TBT_S = 2.0, 0.2
"""Targets assumed for a server that does not tell any."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        id: which rule found it.
        symptom: what people notice.
        cause: why, as far as the evidence goes.
        evidence: the figures, with the names they were read under.
        fix: what to do about it.
    """

    id: str
    symptom: str
    cause: str
    evidence: str
    fix: str


@dataclass(frozen=True, slots=True)
class Case:
    """One server.

    Attributes:
        readings: of its metrics.
        state: Kaiseki's state document with `settings`; empty for other servers and without a key.
        requests: one line per recent request, newest first; empty likewise.
        loads: running and waiting requests of this server and of the others like it, by address.
    """

    readings: Readings
    state: dict[str, Any] = field(default_factory=dict)
    requests: Sequence[dict[str, Any]] = ()
    loads: dict[str, float] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Effective settings, empty when not told."""
        found: dict[str, Any] = self.state.get("settings", {})
        return found

    @property
    def kaiseki(self) -> bool:
        """Whether our scheduler decides there."""
        return self.readings.has("kaiseki_decide_seconds_count")

    def targets_s(self, name: str) -> dict[str, float]:
        """Targets of one kind (`ttft_ms`, `tbt_ms`) by class, seconds; without classes that have none."""
        classes = self.settings.get("classes", {})
        return {c: told[name] / 1e3 for c, told in classes.items() if told.get(name) is not None}


Rule = Callable[[Case], Finding | None]


def ms(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
