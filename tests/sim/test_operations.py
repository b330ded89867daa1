"""Failures, recoveries, and pools that grow and shrink: nobody is lost, and everybody ends once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.loads import load
from tests.sim.running import Ran, run_all
from tests.sim.test_handover import split

from kaiseki.core.reasons import Outcome
from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster
from kaiseki.sim.cluster import Happens, Scale
from kaiseki.sim.operations import wanted
from kaiseki.sim.run import Case, simulate
from kaiseki.work.batches import Batch

Make = Callable[..., Case]


def happens(what: str, at_s: float, replica: int = 0, pool: str = "main") -> Happens:
    return Happens(at_s=at_s, what=what, pool=pool, replica=replica)  # type: ignore[arg-type]


def assert_all_done_once(ran: Ran, requests: int) -> None:
    log = ran.log
    assert sorted(int(r.id) for r, _ in (*log.endings, *log.refusals)) == list(range(requests))
    for request, ending in log.endings:
        assert (ending.outcome, ending.outputs) == (Outcome.COMPLETED, request.max_tokens)
        assert ending.arrival_ns <= ending.admitted_ns < ending.first_token_ns <= ending.ended_ns
    assert sum(g.size for g in log.gaps) == sum(e.outputs - 1 for _, e in log.endings)
    for replica in ran.replicas:
        replica.kv.check()
        assert replica.open_requests == replica.scheduler.table.open_rows == replica.kv.live_blocks() == 0


def test_a_request_goes_on_elsewhere_with_the_tokens_it_has(case: Make) -> None:
    alone = run_all(case(Batch.of(0, [0], [700], [100]), replicas=2, router="round-robin")).log.endings[0][1]
    at_s = alone.ended_ns / 2e9
    failing = replace(
        case(Batch.of(0, [0], [700], [100]), replicas=2, router="round-robin"),
        events=[happens("fail", at_s, 1)],
    )
    ran = run_all(failing)
    assert_all_done_once(ran, 1)
    ((_, ending),) = ran.log.endings
    assert ran.log.retried == 1 and ran.log.changes == [(round(at_s * 1e9), "fail", 1)]
    assert ending.first_token_ns == alone.first_token_ns
    # What is lost is computed again, some 750 tokens at once: one long gap, then on as before.
    assert 700 < ending.recomputed < 800
    gaps = np.concatenate(ran.log.gaps)
    assert np.count_nonzero(gaps > 2 * np.median(gaps)) == 1
    assert gaps.max() < 2 * alone.first_token_ns
    assert ending.ended_ns < alone.ended_ns + 2 * alone.first_token_ns


@pytest.mark.parametrize("name", ["fcfs", "kaiseki"])
def test_failure_and_recovery_under_load(name: str, case: Make) -> None:
    events = [happens("fail", 2.0), happens("recover", 4.0), happens("fail", 5.0, 1)]
    ran = run_all(replace(case(load(80, 12.0), replicas=2), events=events), name)
    assert_all_done_once(ran, 80)
    assert ran.log.retried > 0
    late = [e for _, e in ran.log.endings if e.ended_ns > 5.2e9]
    assert late and ran.replicas[0].engine.iterations > 50, "the first one is back at work"


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    at=st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from("pd"), st.integers(0, 1)), max_size=4),
    gb_s=st.sampled_from([0.5, 50.0]),
)
def test_split_fleets_lose_nobody_whichever_side_fails(
    seed: int, at: list[tuple[float, str, int]], gb_s: float
) -> None:
    events = [happens("fail", s, i, pool) for s, pool, i in at]
    events += [happens("recover", s + 0.5, i, pool) for s, pool, i in at]
    links = f"gb_s: {gb_s}, latency_us: 50, max_active: 3, feedback_us: 200, headroom: 0.3"
    ran = run_all(replace(split(load(25, 15.0, seed), links=links), events=events))
    assert_all_done_once(ran, 25)


def test_who_finds_no_replica_waits_for_one(case: Make) -> None:
    events = [happens("fail", 0.0), happens("recover", 9.0)]
    ran = run_all(replace(case(load(5, 10.0)), events=events))
    assert_all_done_once(ran, 5)
    assert min(e.admitted_ns for _, e in ran.log.endings) >= 9.0e9


def test_where_none_comes_back_requests_fail(case: Make) -> None:
    ran = run_all(replace(case(load(20, 10.0)), events=[happens("fail", 1.0)]))
    assert sorted(int(r.id) for r, _ in ran.log.endings) == list(range(20))
    outcomes = [e.outcome for _, e in ran.log.endings]
    assert set(outcomes) == {Outcome.COMPLETED, Outcome.FAILED}


def test_a_drained_replica_finishes_what_it_has_and_costs_no_more(case: Make) -> None:
    drained = replace(case(load(60, 8.0), replicas=2), events=[happens("drain", 2.0, 1)])
    ran = run_all(drained)
    assert_all_done_once(ran, 60)
    assert ran.log.retried == 0
    last = ran.log.ended_ns
    assert ran.replicas[0].on_ns(0, last) == last
    assert 2.0e9 <= ran.replicas[1].on_ns(0, last) < 4.0e9
    figures, whole = (
        simulate(drained, policy("fcfs")),
        simulate(case(load(60, 8.0), replicas=2), policy("fcfs")),
    )
    assert figures["usd_per_million_output_tokens"] < 0.8 * whole["usd_per_million_output_tokens"]
    assert figures["changes"] == [{"t_s": 2.0, "what": "drain", "pool": "main", "replica": 1}]


@given(
    demands=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=8),
    low=st.floats(0.1, 1.0),
    above=st.floats(0.0, 1.0),
)
def test_a_steady_load_moves_a_pool_one_way_only(demands: Sequence[float], low: float, above: float) -> None:
    scale = Scale(most=10, in_below=low, out_above=low + above)
    total, n, steps = sum(demands), len(demands), []
    while (step := wanted([total / n] * n, 0, scale)) != 0 and len(steps) < 20:
        steps.append(step)
        n += step
    assert len(steps) < 10 and len(set(steps)) <= 1


GOOD = """
model: llama-3-8b
pools: [{name: main, card: h100, replicas: 2, scale: {most: 4}}]
events: [{at_s: 3, what: fail, pool: main, replica: 3}]
"""


def test_spare_replicas_belong_to_the_fleet() -> None:
    assert [r.spare for r in cluster.fleet(cluster.parse(GOOD))] == [False, False, True, True]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (GOOD.replace("replica: 3", "replica: 4"), ("events[0].replica", "4", "4 replicas")),
        (GOOD.replace("pool: main,", "pool: other,"), ("events[0].pool", "other", "main")),
        (GOOD.replace("what: fail", "what: explode"), ("events[0].what", "explode", "drain")),
        (GOOD.replace("at_s: 3", "at_s: -3"), ("events[0].at_s", "-3")),
        (GOOD.replace("most: 4", "most: 1"), ("pools[0].scale", "2 replicas")),
        (GOOD.replace("most: 4", "most: 4, in_below: 0.95"), ("pools[0].scale.in_below", "0.95", "0.9")),
        (GOOD.replace("{most: 4}", "{}"), ("pools[0].scale.most", "required")),
    ],
)
def test_a_mistake_is_named(wrong: str, says: tuple[str, ...]) -> None:
    with pytest.raises(cluster.ConfigError) as caught:
        cluster.fleet(cluster.parse(wrong))
    for part in says:
        assert part in str(caught.value)
