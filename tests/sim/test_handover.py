"""Prefill on one replica, decode on another: one life for the user, and all books balance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.loads import PLAN, chain, load
from tests.sim.running import Ran, run_all, without_wall

from kaiseki.core.protocols import F_CONTEXT, F_DECODES, F_SLOT, N_FEATURES
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.cost.roofline import Roofline
from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster
from kaiseki.sim.run import Case, lone_prefill_s, simulate
from kaiseki.work import classes
from kaiseki.work.batches import Batch
from kaiseki.work.shaping import Shape

POLICIES = ("static", "fcfs", "priority", "sarathi", "edf", "srpt", "vtc", "kaiseki")
KV_BYTES = 131_072
"""Of a token of llama-3-8b: 32 layers, 8 heads of 128, keys and values, bf16."""


def split(
    batch: Batch,
    prefill: str = "replicas: 2, kv_blocks: 300",
    decode: str = "replicas: 2, kv_blocks: 300",
    links: str = "gb_s: 45, latency_us: 10, max_active: 4, feedback_us: 100, headroom: 0.3",
    plan: str = PLAN,
    mixed: str = "",
) -> Case:
    """A load on a fleet of prefill and decode pools, and perhaps one of whole replicas."""
    text = f"""
model: llama-3-8b
pools:
  - {{name: p, role: prefill, card: a100-80, max_batch_size: 32, {prefill}}}
  - {{name: d, role: decode, card: a100-80, max_batch_size: 32, {decode}}}
{mixed}
links: {{{links}}}
"""

    def stream(shape: Shape) -> Iterator[Batch]:
        return shape.apply([batch])

    described = cluster.parse(text)
    return Case(stream, classes.parse(plan), cluster.fleet(described), links=described.links)


def assert_books_balance(ran: Ran, requests: int) -> None:
    log = ran.log
    ids = [r.id for r, _ in (*log.endings, *log.refusals)]
    assert sorted(int(i) for i in ids) == list(range(requests))
    for request, ending in log.endings:
        if ending.outcome == Outcome.COMPLETED:
            assert ending.outputs == request.max_tokens
            assert ending.arrival_ns <= ending.admitted_ns < ending.first_token_ns <= ending.ended_ns
    assert sum(g.size for g in log.gaps) == sum(max(e.outputs - 1, 0) for _, e in log.endings)
    for replica in ran.replicas:
        replica.kv.check()
        assert replica.open_requests == replica.scheduler.table.open_rows == 0
        assert replica.kv.free_blocks() == replica.kv.total_blocks
    moved = [t for link in ran.links.values() for t in link.moved]
    sent = {r.id: r.prompt_tokens * KV_BYTES for r, e in log.endings if e.outputs and r.max_tokens > 1}
    assert {t.request_id: t.size_bytes for t in moved} == sent and len(moved) == len(sent)


def decode_ns(case: Case, context: int) -> int:
    """A step of one decode that reads so many positions."""
    features = np.zeros((1, N_FEATURES))
    features[0, F_SLOT] = features[0, F_DECODES] = 1.0
    features[0, F_CONTEXT] = context
    return int(Roofline(case.fleet[0].deployment).iterations_ns(features)[0])


@pytest.mark.parametrize("headroom", [0.0, 0.3])
@pytest.mark.parametrize("name", ["fcfs", "kaiseki"])
def test_a_lone_request_takes_prefill_latency_bytes_and_decode(headroom: float, name: str) -> None:
    links = f"gb_s: 45, latency_us: 10, headroom: {headroom}"
    case = split(Batch.of(0, [0], [700], [4]), links=links)
    log = run_all(case, name).log
    ((_, ending),) = log.endings
    prefill = float(lone_prefill_s(case.fleet)(np.array([700], np.int32))[0]) * 1e9
    moving = 10_000 + 700 * KV_BYTES / (45 * (1 - headroom))
    gaps = [decode_ns(case, 701) + moving, decode_ns(case, 702), decode_ns(case, 703)]
    if name == "fcfs":
        assert ending.first_token_ns == pytest.approx(prefill, abs=1000)
    assert np.concatenate(log.gaps) == pytest.approx(gaps, abs=2)
    assert ending.ended_ns - ending.first_token_ns == pytest.approx(sum(gaps), abs=8)
    assert (ending.prompt, ending.outputs, ending.cached, ending.recomputed) == (700, 4, 0, 0)


def test_a_request_of_one_token_ends_where_its_prompt_is_computed() -> None:
    ran = run_all(split(Batch.of(0, [0], [700], [1])))
    assert_books_balance(ran, 1)
    assert not ran.links["p", "d"].moved
    assert [r.engine.iterations > 0 for r in ran.replicas] == [True, False, False, False]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("blocks", [110, 300])
def test_every_request_ends_once_and_all_blocks_come_back(name: str, blocks: int) -> None:
    case = split(load(80, 30.0), decode=f"replicas: 2, kv_blocks: {blocks}")
    ran = run_all(case, name)
    assert_books_balance(ran, 80)
    assert all(replica.engine.iterations > 0 for replica in ran.replicas)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rate=st.floats(1.0, 200.0),
    gb_s=st.sampled_from([0.5, 5.0, 50.0]),
    most=st.integers(1, 50),
    pp=st.integers(1, 2),
)
def test_books_balance_under_any_load(seed: int, rate: float, gb_s: float, most: int, pp: int) -> None:
    links = f"gb_s: {gb_s}, latency_us: 50, max_active: {most}, feedback_us: 200, headroom: 0.3"
    pools = f"replicas: 2, kv_blocks: 130, pp: {pp}"
    ran = run_all(split(load(25, rate, seed), pools, pools, links))
    assert_books_balance(ran, 25)
    link = ran.links["p", "d"]
    assert link.most_active <= most and link.peak_gb_s <= 0.7 * gb_s * (1 + 1e-12)


def test_what_is_given_up_on_either_side_ends_once() -> None:
    plan = PLAN.replace("tbt_ms: 40,", "tbt_ms: 10, on_late: expire,")
    ran = run_all(split(load(150, 100.0), plan=plan, links="gb_s: 1"))
    assert_books_balance(ran, 150)
    lost = [e for _, e in ran.log.endings if e.outcome == Outcome.EXPIRED]
    assert {e.reason for e in lost} == {Reason.HOPELESS, Reason.LATE_GAPS}
    assert {e.outputs > 0 for e in lost} == {False, True}


def test_what_never_fits_on_one_side_is_refused_before_it_costs_a_prefill() -> None:
    batch = Batch.of(0, [0, 1, 2], [3000, 700, 60], [10, 10, 2000])
    ran = run_all(split(batch, "kv_blocks: 150", "kv_blocks: 100"))
    assert_books_balance(ran, 3)
    refused = {r.id: (refusal.reason, refusal.numbers["pool_blocks"]) for r, refusal in ran.log.refusals}
    assert refused == {"0": (Reason.NEVER_FITS, 100), "2": (Reason.NEVER_FITS, 100)}
    assert sum(replica.scheduler.life.prefix_queried for replica in ran.replicas) == 700


def test_kv_stays_on_the_prefill_side_until_it_has_landed() -> None:
    # One prompt's KV fills most of the pool, so the next can only start when it has gone.
    batch = Batch.of(0, [0, 0], [1000, 1000], [2, 2])
    log = run_all(split(batch, "kv_blocks: 70", links="gb_s: 0.1"), "fcfs").log
    (_, first), (_, second) = log.endings
    moving = 1000 * KV_BYTES / 0.1
    assert 0 <= second.first_token_ns - (first.first_token_ns + moving) < first.first_token_ns


def test_kv_leaves_only_when_its_place_is_reserved() -> None:
    batch = Batch.of(0, [0, 0], [1000, 1000], [50, 2])
    ran = run_all(split(batch, "kv_blocks: 300", "kv_blocks: 80"), "fcfs")
    first, second = (next(e for r, e in ran.log.endings if r.id == i) for i in "01")
    moved = {t.request_id: t for t in ran.links["p", "d"].moved}
    assert moved["1"].asked_ns < first.ended_ns <= moved["1"].started_ns
    assert second.first_token_ns < first.ended_ns


def test_what_was_lost_before_stays_best_effort_after() -> None:
    plan = PLAN.replace("ttft_ms: 400", "ttft_ms: 1")
    log = run_all(split(load(20, 5.0), plan=plan)).log
    chats = [e for r, e in log.endings if r.cls.name == "chat"]
    assert chats and all(e.demoted and not e.attained and e.outcome == Outcome.COMPLETED for e in chats)


def test_without_a_cap_everybody_waits_for_everybody() -> None:
    batch = Batch.of(0, np.zeros(9), np.full(9, 250), np.full(9, 3))
    case = {  # 10 ms each; all prompts but the first are done in one step
        cap: split(batch, "kv_blocks: 400", "kv_blocks: 400", f"gb_s: 3.25, max_active: {cap}")
        for cap in (1, 1000)
    }
    ran = {cap: run_all(made, "fcfs") for cap, made in case.items()}
    late = {cap: int((np.concatenate(r.log.gaps) > 40e6).sum()) for cap, r in ran.items()}
    held = {
        cap: sum(t.landed_ns - t.started_ns for t in r.links["p", "d"].moved[1:]) for cap, r in ran.items()
    }
    assert late[1000] == 8 and late[1] == 6  # with two steps of the decodes, the first two are in time
    assert held[1000] == pytest.approx(8 * held[1], rel=0.01)
    slowest = {cap: max(g.max() for g in r.log.gaps) for cap, r in ran.items()}
    assert slowest[1] == pytest.approx(slowest[1000], rel=0.05)


def test_whole_replicas_may_stand_beside_split_ones() -> None:
    mixed = "  - {name: m, card: a100-80, kv_blocks: 300, max_batch_size: 32}"
    ran = run_all(split(load(80, 30.0), mixed=mixed), "kaiseki")
    log = ran.log
    assert sorted(int(r.id) for r, _ in log.endings) == list(range(80)) and not log.refusals
    assert all(r.engine.iterations > 0 and r.kv.live_blocks() == 0 for r in ran.replicas)
    assert 0 < len(ran.links["p", "d"].moved) < 80


def test_followers_wait_for_the_end_of_the_decode() -> None:
    log = run_all(split(chain(4, think_ns=2_000_000_000))).log
    ends = {int(r.id): e for r, e in log.endings}
    for turn in range(1, 4):
        assert ends[turn].arrival_ns == ends[turn - 1].ended_ns + 2_000_000_000


def test_figures_of_pools_and_links() -> None:
    figures = simulate(split(load(60, 20.0)), policy("kaiseki"))
    pools, (link,) = figures["pools"], figures["links"].values()
    assert {name: pool["role"] for name, pool in pools.items()} == {"p": "prefill", "d": "decode"}
    assert sum(pool["iterations"] for pool in pools.values()) == figures["iterations"]
    mean = sum(pool["gpu_utilisation"] * pool["cards"] for pool in pools.values()) / figures["cards"]
    assert mean == pytest.approx(figures["gpu_utilisation"])
    assert list(figures["links"]) == ["p>d"] and link["most_active"] <= 4
    assert figures["link_peak_gb_s"] == link["peak_gb_s"] == pytest.approx(31.5)
    assert link["queue_ms"]["p99"] >= 0 and link["transfer_ms"]["p50"] > 0.01
    assert link["moved_gb"] > 1 and link["transfers"] <= 60


def test_the_same_input_gives_the_same_figures() -> None:
    first, again = (simulate(split(load(60, 30.0)), policy("kaiseki")) for _ in range(2))
    assert without_wall(first) == without_wall(again)
