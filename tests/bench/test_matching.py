"""The gap of the matching to the optimum, on kept instances."""

from __future__ import annotations

import json
import runpy
from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

from kaiseki.bench import matching as bench
from kaiseki.bench.matching import FAMILIES, INSTANCES, TARGET_GAP, load, match, measure, worth_of
from kaiseki.bench.matching_exact import Instance, solve
from kaiseki.cli import app


def tiny(seed: int) -> Instance:
    rng = np.random.default_rng(seed)
    time, kv = (rng.integers(1, 10, (5, 2)).astype(float) for _ in range(2))
    return Instance(rng.integers(1, 10, (5, 2)).astype(float), time, kv, np.full(2, 9.0), np.full(2, 9.0))


@pytest.mark.parametrize("seed", range(5))
def test_the_solver_finds_what_trying_everything_finds(seed: int) -> None:
    instance = tiny(seed)
    most = 0.0
    for cards in product((-1, 0, 1), repeat=5):
        on = np.array(cards)[:, None] == np.arange(2)
        fits = ((instance.time * on).sum(0) <= 9).all() and ((instance.kv * on).sum(0) <= 9).all()
        most = max(most, worth_of(instance, np.array(cards, np.int32)) if fits else 0.0)
    assert solve(instance, whole=True).worth == pytest.approx(most)
    assert solve(instance, whole=False).worth >= most - 1e-6
    assert worth_of(instance, match(instance)) <= most


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gap_is_within_the_target(family: str) -> None:
    cases = [measure(instance, FAMILIES[family], repeats=1) for instance in list(load(family).values())[:7]]
    assert 0.0 <= np.median([case["gap"] for case in cases]) <= TARGET_GAP
    assert min(case["gap"] for case in cases) >= -1e-6
    assert 0.4 <= np.median([case["admitted"] for case in cases]) <= 0.6
    for capacity in ("time", "kv"):
        assert np.median([case["slack"][capacity] for case in cases]) < 0.01


def test_the_instances_are_what_their_script_makes() -> None:
    script = runpy.run_path(str(INSTANCES.parents[1] / "matching_instances.py"))
    for family, (size, affinity) in zip(FAMILIES, product(script["SIZES"], (False, True)), strict=True):
        kept = load(family)
        assert len(kept) == script["SEEDS"]
        seed = list(kept)[3]
        made = script["make"](*script["SIZES"][size], affinity, seed)
        assert script["is_tight"](made)
        np.testing.assert_allclose(kept[seed].value, made["value"], rtol=1e-6)
        np.testing.assert_array_equal(kept[seed].kv, made["kv"])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "load", lambda family, folder: dict(list(load(family, folder).items())[:2]))


def test_the_command_prints_json_and_nothing_else(few: None) -> None:
    result = CliRunner().invoke(app, ["bench", "matching", "--repeats", "1", "--json"])
    document = json.loads(result.stdout)
    assert len(document["cases"]) == 2 * len(FAMILIES)
    for case in document["cases"]:
        assert {"chunks", "cards", "gap", "reference", "greedy_us", "exact_us"} <= set(case)
    assert result.exit_code == (0 if all(family["ok"] for family in document["families"]) else 1)


def test_a_missed_target_is_a_finding(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TARGET_GAP", -1.0)
    result = CliRunner().invoke(app, ["bench", "matching", "--repeats", "1"])
    assert result.exit_code == 1
    assert "missed" in result.stdout


def test_without_the_instances_it_says_where_they_are(tmp_path) -> None:
    result = CliRunner().invoke(app, ["bench", "matching", "--instances", str(tmp_path)])
    assert result.exit_code == 2
    assert "checkout" in result.stderr
