"""Simulations keep books: nothing is lost, time goes forward, and the same input gives the same figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.loads import PLAN, chain, load
from tests.sim.running import run, without_wall

from kaiseki.core.reasons import Outcome
from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster
from kaiseki.sim.routers import ROUTERS
from kaiseki.sim.run import Case, lone_prefill_s, simulate
from kaiseki.work import classes
from kaiseki.work.batches import Batch, Blocks
from kaiseki.work.shaping import Shape

Make = Callable[..., Case]
POLICIES = ("static", "fcfs", "priority", "sarathi", "edf", "srpt", "vtc", "kaiseki")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("pp", [1, 2])
def test_every_request_ends_once_with_all_its_tokens(case: Make, name: str, pp: int) -> None:
    log, replicas = run(case(pp=pp, blocks=250), name)
    assert sorted(int(r.id) for r, _ in log.endings) == list(range(60)) and not log.refusals
    for request, ending in log.endings:
        if ending.outcome == Outcome.COMPLETED:
            assert ending.outputs == request.max_tokens
            assert ending.arrival_ns <= ending.admitted_ns < ending.first_token_ns <= ending.ended_ns
    for replica in replicas:
        replica.kv.check()
        assert replica.open_requests == 0 and replica.kv.live_blocks() == 0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), pp=st.integers(1, 3), rate=st.floats(1.0, 200.0))
def test_tokens_add_up_under_any_load(seed: int, pp: int, rate: float) -> None:
    text = f"""
    model: llama-3-8b
    pools: [{{name: a, card: a100-80, pp: {pp}, kv_blocks: 260, max_batch_size: 8, replicas: 2}}]
    """
    batch = load(40, rate, seed)

    def stream(shape: Shape) -> Any:
        return shape.apply([batch])

    made = Case(stream, classes.parse(PLAN), cluster.fleet(cluster.parse(text)))
    log, _ = run(made)
    done = [(r, e) for r, e in log.endings if e.outcome == Outcome.COMPLETED]
    gaps = sum(g.size for g in log.gaps)
    assert len(log.endings) == 40
    assert gaps == sum(max(e.outputs - 1, 0) for _, e in log.endings)
    assert all(e.outputs == r.max_tokens for r, e in done)


def test_the_same_seed_gives_the_same_figures_and_another_one_others(case: Make) -> None:
    first, again = simulate(case(), policy("kaiseki")), simulate(case(), policy("kaiseki"))
    assert without_wall(first) == without_wall(again)
    other = simulate(case(load(seed=1)), policy("kaiseki"))
    assert without_wall(other) != without_wall(first)


def test_an_idle_fleet_takes_as_long_as_the_cost_model_says(case: Make) -> None:
    batch = Batch.of(0, [0], [700], [1])
    figures = simulate(case(batch), policy("fcfs", budget_tokens=2048))
    alone_ms = float(lone_prefill_s(case().fleet)(np.array([700], np.int32))[0]) * 1e3
    assert figures["ttft_ms"]["p50"] == pytest.approx(alone_ms, rel=1e-6)
    assert figures["iterations"] == 1


def test_a_follower_arrives_its_delay_after_its_parent_has_ended(case: Make) -> None:
    log, _ = run(case(chain(4, think_ns=2_000_000_000)))
    ends = {int(r.id): e for r, e in log.endings}
    assert len(ends) == 4
    for turn in range(1, 4):
        assert ends[turn].arrival_ns == ends[turn - 1].ended_ns + 2_000_000_000


def test_shared_prefixes_are_found_and_different_ones_are_not(case: Make) -> None:
    rows = [[7, 8], [7, 9], [3, 8]]
    batch = Batch.of(0, [0, 10**10, 2 * 10**10], [1024] * 3, [2] * 3, blocks=Blocks.of(rows))
    log, _ = run(case(batch))
    cached = {int(r.id): e.cached for r, e in log.endings}
    assert cached == {0: 0, 1: 512, 2: 0}


def test_pipeline_stages_work_on_different_requests_at_once(case: Make) -> None:
    batch = Batch.of(0, np.zeros(30), np.full(30, 2000), np.full(30, 1))
    one, two = (simulate(case(batch, pp=pp), policy("fcfs", budget_tokens=512)) for pp in (1, 2))
    assert two["simulated_s"] < 0.6 * one["simulated_s"]


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_every_router_uses_the_fleet_and_nothing_is_lost(case: Make, router: str) -> None:
    log, replicas = run(case(load(80, 40.0), replicas=3, router=router))
    assert len(log.endings) == 80
    assert all(r.engine.iterations > 0 for r in replicas)


def test_a_prefix_aware_router_keeps_a_prefix_together(case: Make) -> None:
    rows = [[i % 4, 100 + i] for i in range(40)]
    batch = Batch.of(0, np.arange(40) * 10**9, np.full(40, 1024), np.full(40, 2), blocks=Blocks.of(rows))
    hits = {}
    for router in ("round-robin", "prefix-aware"):
        hits[router] = simulate(case(batch, replicas=3, router=router), policy("kaiseki"))["prefix_hit_rate"]
    assert hits["prefix-aware"] == pytest.approx(36 * 512 / (40 * 1024))
    assert hits["round-robin"] < hits["prefix-aware"]


def test_what_never_fits_is_refused_with_the_numbers(case: Make) -> None:
    batch = Batch.of(0, [0, 5], [100_000, 50], [10, 10])
    log, _ = run(case(batch, blocks=300))
    (request, refusal), *more = log.refusals
    assert not more and request.id == "0" and refusal.numbers["pool_blocks"] == 300
    assert [r.id for r, _ in log.endings] == ["1"]


def test_figures_by_class_and_tenant_add_up(case: Make) -> None:
    figures = simulate(case(), policy("kaiseki"))
    for part in ("classes", "tenants"):
        assert sum(found["requests"] for found in figures[part].values()) == figures["requests"] == 60
        tokens = sum(found["output_tokens_per_s"] for found in figures[part].values())
        assert tokens == pytest.approx(figures["output_tokens_per_s"])
    assert figures["tenants"].keys() == {"acme", "labs"} and figures["classes"].keys() == {"chat", "batch"}


def test_a_fleet_without_roles_gives_the_figures_it_always_gave(case: Make) -> None:
    figures = simulate(case(load(120, 20.0), replicas=3, blocks=250), policy("kaiseki"))
    assert figures["iterations"] == 1298 and figures["preemptions"] == 26
    assert figures["attainment"] == pytest.approx(110 / 120)
    assert figures["ttft_ms"]["p50"] == pytest.approx(114.0945395)
    assert figures["links"] == {} and figures["link_peak_gb_s"] is None
    assert figures["pools"]["main"]["iterations"] == 1298 and figures["pools"]["main"]["role"] == "mixed"
