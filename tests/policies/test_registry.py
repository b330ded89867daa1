"""Policies by name, with settings, and from other packages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.harness import BUILT_IN, START_NS, Bench, job

from kaiseki.core.policy import Policy
from kaiseki.core.reasons import Outcome
from kaiseki.policies.registry import UnknownPolicy, load, names

THIRD_PARTY = "docs.examples.shortest_first:ShortestFirst"


def test_all_built_in_policies_are_found_under_their_own_names() -> None:
    assert {"fcfs", "lpm", "kaiseki"} < set(BUILT_IN) <= set(names())
    for name in BUILT_IN:
        policy = load(name)
        assert isinstance(policy, Policy) and policy.name == name
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy.tau_ms = 1.0  # type: ignore[misc]


def test_settings_are_passed_on_and_unknown_ones_named() -> None:
    assert load("sarathi", budget_tokens=64).budget_tokens == 64
    with pytest.raises(ValueError, match=r"'fcfs' has no setting 'budget' \(given 3\).*budget_tokens"):
        load("fcfs", budget=3)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nonesuch", "is not installed; there are"),
        ("no.such.module:Policy", "No module named 'no'"),
        ("kaiseki.policies.fcfs:Nothing", "has no attribute 'Nothing'"),
        ("kaiseki.core.scheduler:Scheduler", "is not a subclass"),
        ("kaiseki.policies.registry:names", "is not a subclass"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(name: str, told: str) -> None:
    with pytest.raises(UnknownPolicy, match=told):
        load(name)


def test_a_third_partys_policy_runs_a_whole_load_in_its_own_order() -> None:
    bench = Bench(load(THIRD_PARTY, budget_tokens=128), audit=True)
    rng = np.random.default_rng(5)
    lengths = rng.integers(10, 600, 30).tolist()
    bench.run([job(f"r{i}", length, 5) for i, length in enumerate(lengths)])
    bench.check_end()
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    firsts = [bench.served[f"r{i}"].times_ns[0] for i in np.argsort(lengths, kind="stable")]
    assert firsts == sorted(firsts), "shorter prompts were to get their first token first"


def test_the_example_ages_what_waits() -> None:
    policy = load(THIRD_PARTY, tokens_per_s=100.0)
    bench = Bench(policy)
    bench.submit(job("old long", 300, 1))
    bench.submit(job("new short", 250, 1, START_NS + 2 * 10**9))
    bench.run()
    assert bench.served["old long"].times_ns[0] <= bench.served["new short"].times_ns[0]


def test_every_setting_of_a_policy_is_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(Policy):
        assert f"| `{field.name}` |" in page, field.name
