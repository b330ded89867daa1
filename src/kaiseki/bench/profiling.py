"""Where the time of a slot goes, by function."""

from __future__ import annotations

import cProfile
import pstats
import time
from pathlib import Path
from typing import Any

from kaiseki.bench.replica import Replica

PARTS = 5
TOP = 30
_ROOT = Path(__file__).resolve().parents[1]


def profile_slots(replica: Replica, churn: int, slots: int, top: int = TOP) -> list[dict[str, Any]]:
    """The functions in which most time is spent, own time first.

    The slots are profiled in a few parts and the fastest counts, as the profiler's clock also runs while
    other programs have the CPU. Compiled kernels are no Python functions: their time is that of their
    caller. The profiler itself slows down what makes many calls.

    Args:
        replica: under its load.
        churn: how many arrive, and end, per slot.
        slots: how many to profile.
        top: how many functions to report.
    """
    fastest, best = float("inf"), None
    each = max(slots // PARTS, 1)
    for _ in range(PARTS):
        profile = cProfile.Profile()
        took = 0.0
        for _ in range(each):
            took += _one(profile, replica, churn)
        if took < fastest:
            fastest, best = took, profile
    stats = pstats.Stats(best).stats  # type: ignore[attr-defined]
    rows = [
        {
            "function": _name(*where),
            "calls": calls / each,
            "own_us": own / each * 1e6,
            "us": cumulative / each * 1e6,
        }
        for where, (_, calls, own, cumulative, _) in stats.items()
    ]
    rows.sort(key=lambda row: -row["own_us"])
    return rows[:top]


def _one(profile: cProfile.Profile, replica: Replica, churn: int) -> float:
    """A slot, of which only what `SlotCost` counts is profiled. Returns the seconds of that."""
    arrivals = replica.arrivals(churn)
    begin = time.perf_counter()
    profile.enable()
    replica.submit(arrivals)
    decision = replica.decide()
    profile.disable()
    decided = time.perf_counter()
    result = replica.step(decision, churn)
    stepped = time.perf_counter()
    profile.enable()
    replica.apply(result)
    profile.disable()
    return time.perf_counter() - stepped + decided - begin


def _name(file: str, line: int, function: str) -> str:
    """`core/scheduler.py:161 decide`, or the bare name of what is built in."""
    if file.startswith("~"):
        return function
    path = Path(file)
    short = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else Path(*path.parts[-2:])
    return f"{short}:{line} {function}"
