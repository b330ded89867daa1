"""Training that shares the cards with inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.sim.loads import load
from tests.sim.running import without_wall

from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster
from kaiseki.sim.cluster import Happens, Training
from kaiseki.sim.run import Case, build, simulate
from kaiseki.work.batches import Batch

Make = Callable[..., Case]
SECTION = Training(pool="main", tokens=4000, steps_per_s=0.7)
"""A step takes some 0.4 s alone."""


def run(case: Case, name: str = "kaiseki", section: Training | None = SECTION) -> dict[str, Any]:
    return simulate(replace(case, training=section), policy(name))


def test_steps_follow_one_another_while_requests_are_open(case: Make) -> None:
    idle = Batch.of(0, [0, 10 * 10**9], [20, 20], [1, 1])
    simulation = build(replace(case(idle, replicas=2), training=SECTION), policy("kaiseki"))
    log = simulation.run()
    assert sorted(int(r.id) for r, _ in log.endings) == [0, 1], "steps are no requests"
    for replica in (0, 1):
        mine = [step for step in simulation.steps if step.replica == replica]
        assert [b.began_ns for b in mine[1:]] == [a.ended_ns for a in mine[:-1]]
        assert 10e9 <= mine[-1].ended_ns < 12e9
        assert np.median([s.ended_ns - s.began_ns for s in mine]) < 0.6e9


def test_it_makes_its_progress_and_chats_keep_their_targets(case: Make) -> None:
    alone, both = run(case(load(80, 5.0)), section=None), run(case(load(80, 5.0)))
    assert alone["training"] is None
    assert both["requests"] == alone["requests"] == 80
    assert both["training"]["steps_per_s"] >= SECTION.steps_per_s
    assert both["training"]["in_time"] > 0.8
    chats = [figures["classes"]["chat"]["attainment"] for figures in (alone, both)]
    assert chats[1] >= chats[0] - 0.05
    bare = run(case(load(80, 5.0)), "fcfs")
    assert bare["classes"]["chat"]["attainment"] < chats[1] - 0.2, "first come, first served does not"
    assert without_wall(both) == without_wall(run(case(load(80, 5.0))))


def test_a_step_whose_replica_fails_is_done_when_it_is_back(case: Make) -> None:
    events = [Happens(at_s=1.0, what="fail", pool="main"), Happens(at_s=2.0, what="recover", pool="main")]
    figures = run(replace(case(load(20, 8.0)), events=events))
    assert figures["completed"] == 20 and figures["training"]["steps"] > 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [("pool: b, tokens: 100", ("training.pool", "b", "a")), ("pool: a, tokens: 90000", ("tokens", "32000"))],
)
def test_a_mistake_is_named(wrong: str, says: tuple[str, ...]) -> None:
    text = (
        "model: llama-3-8b\npools: [{name: a, card: h100, kv_blocks: 2000}]\n"
        f"training: {{{wrong}, steps_per_s: 1}}"
    )
    with pytest.raises(cluster.ConfigError) as caught:
        cluster.fleet(cluster.parse(text))
    for part in says:
        assert part in str(caught.value)
