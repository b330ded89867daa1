"""Experiments run, and what they say follows from what is put in."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from kaiseki.cli import app
from kaiseki.sim.experiments import EXPERIMENTS, Row
from kaiseki.sim.experiments.baseline_c import APART, BESIDE, batch_with, speed_up, tokens_per_step
from kaiseki.sim.experiments.chunk_size import QUANTA

FEW = 8


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_prints_rows(name: str) -> None:
    one = EXPERIMENTS[name]
    rows = [row.as_dict() for row in one.rows(FEW)]
    assert rows and len({row["metric"] for row in rows}) == len(rows), "two rows have one name"
    assert all(set(row) == {"metric", "reported", "measured", "ratio"} for row in rows)
    assert any(row["measured"] is not None for row in rows)
    assert one.title and one.setting and one.differs


def test_a_ratio_needs_both_figures() -> None:
    assert Row("m", 3.0, 2.0).ratio == 1.5
    assert Row("m", 3.0).ratio is None and Row("m", None, 2.0).ratio is None


def test_speculation_pays_less_the_larger_the_batch_and_the_farther_away() -> None:
    assert tokens_per_step(1.0, 4) == 5.0 and tokens_per_step(0.0, 4) == 1.0
    ups = [speed_up(BESIDE, batch, apart=False) for batch in (1, 32, 128)]
    assert ups == sorted(ups, reverse=True) and ups[0] > 2.0
    assert speed_up(APART, 32, apart=True) < speed_up(APART, 32, apart=False) < ups[1]
    batch = batch_with(1.45, BESIDE)
    assert speed_up(BESIDE, batch, apart=False) >= 1.45 > speed_up(BESIDE, batch + 1, apart=False)


def test_deciding_by_the_chunk_costs_more_the_smaller_the_chunk() -> None:
    rows = {row.metric: row.measured for row in EXPERIMENTS["chunk-size"].rows(FEW)}
    shares = [rows[f"decided by the chunk, {q} tokens: scheduler's share, %"] for q in QUANTA]
    assert all(a is not None and b is not None and a > b for a, b in pairwise(shares))
    slots = [rows[f"decided by the slot, {q} tokens: scheduler's share, %"] for q in QUANTA]
    assert max(s or 0.0 for s in slots) < 2.0


def test_the_command_lists_and_runs_them() -> None:
    listed = CliRunner().invoke(app, ["experiment"])
    assert listed.exit_code == 0 and all(name in listed.output for name in EXPERIMENTS)
    result = CliRunner().invoke(app, ["experiment", "hetero", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["name"] == "hetero" and found["rows"]
    assert found["differs"] and "reported" in result.stderr


def test_an_unknown_one_is_named_with_those_there_are() -> None:
    result = CliRunner().invoke(app, ["experiment", "baseline-z"])
    assert result.exit_code == 2 and "baseline-z" in result.stderr and "chunk-size" in result.stderr
