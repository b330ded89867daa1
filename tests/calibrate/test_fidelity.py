"""What the comparison of simulator and server counts, and when it says that they differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.fidelity import MAX_WAITING, Record, compare, figures, scene, simulated

from kaiseki.cost.calibrated import FitError, Profile

MS = 1_000_000
WEIGHTS = (10.0 * MS, 1.0 * MS, 1.0, 0.5 * MS, 1.0, 1.0, 1.0)
PROFILE = Profile(
    source="made up",
    weights=WEIGHTS,
    bends=(),
    linear=WEIGHTS,
    fit_error=FitError(median=0, p90=0, max=0),
    samples=1,
)


def record(cls: str = "interactive", at: float = 0.0, ended: str = "completed", n: int = 4) -> Record:
    return Record(cls, at, 50, n, ended, [at + 100 + 20 * i for i in range(n)])


def test_a_real_run_is_counted_as_the_simulator_counts() -> None:
    run = [record(), record("batch", 500.0), replace(record(ended="queue_full"), token_ms=[])]
    found = figures(run)
    assert found["all"]["refused"] == 1 and found["all"]["requests"] == 3
    assert found["all"]["ttft_ms"]["p50"] == 100 and found["all"]["tbt_ms"]["p99"] == 20
    assert found["batch"]["refused"] == 0 and found["batch"]["requests"] == 1


def test_a_recorded_run_is_replayed_with_its_limits(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    here = scene(tmp_path / "profile.json", "fcfs")
    crowd = [record(at=0.0) for _ in range(MAX_WAITING + 5)] + [record("batch", 9000.0)]
    crowd[-1] = replace(crowd[-1], prompt_tokens=700)
    found = simulated(here, crowd, seed=1)
    assert found["all"]["requests"] == len(crowd)
    assert found["all"]["refused"] == 4  # the first begins at once
    assert found["batch"]["requests"] == 1
    assert found["batch"]["ttft_ms"]["p50"] == pytest.approx(10 + 350, rel=0.02)


def test_what_is_off_is_said_unless_real_runs_differ_as_much() -> None:
    def of(p50: float, refused: int) -> dict:
        spread = {"p50": p50, "p99": 2 * p50}
        one = {"ttft_ms": spread, "tbt_ms": spread, "refused": refused}
        return {"all": one, "interactive": one, "batch": one}

    rows = {(r["class"], r["metric"]): r for r in compare([of(100, 20)] * 3, [of(115, 20)] * 3)}
    assert not rows["all", "ttft_ms p50"]["ok"] and rows["all", "ttft_ms p50"]["error"] == pytest.approx(0.15)
    assert rows["all", "ttft_ms p99"]["ok"] and rows["all", "refused"]["ok"]
    uneven = compare([of(90, 20), of(100, 22), of(110, 18)], [of(115, 23)] * 3)
    assert all(row["ok"] for row in uneven)
    assert not next(r for r in compare([of(1, 20)] * 3, [of(1, 22)] * 3) if r["metric"] == "refused")["ok"]
