"""Why a request waited: the parts add up, and name who was preferred."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.workloads import Workload, workloads
from tests.harness import MS, START_NS, Bench, S, job
from tests.observe.waits import Watch, longest_slot_ns

from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.trace import CUTOFF, Trace
from kaiseki.observe.explain import explain
from kaiseki.observe.history import History, Story


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "kaiseki", "vtc", "static"])
@given(work=workloads())
@settings(max_examples=40)
def test_attributed_waits_add_up_to_the_measured_wait(policy: str, depth: int, work: Workload) -> None:
    bench = work.bench(policy, depth, True)
    bench.audit = bench.engine.check = False
    watch = Watch(bench)
    bench.run(work.jobs)
    for name, served in bench.served.items():
        told = bench.driver.explain(name)
        assert told is not None
        if served.outcome == Outcome.REFUSED:
            assert told["timeline"][0]["event"] == "refused" and told["summary"].startswith(
                f"{name} was refused"
            )
            continue
        assert sum(w["ms"] for w in told["waits"]) == pytest.approx(told["total_wait_ms"], abs=0.01)
        assert abs(told["total_wait_ms"] * MS - watch.wait_ns(name)) <= longest_slot_ns(bench) + 1000
        assert all(w["reason"] != "none" for w in told["waits"])
        assert told["timeline"][0]["event"] == "submitted"
        assert told["timeline"][-1]["event"] in ("finished", "expired", "failed", "cancelled")
        assert told["outcome"] == served.outcome.label


TIGHT = ServiceClass("tight", ttft_ns=200 * MS, tbt_ns=2_500_000, weight=8.0)
CROWD = st.lists(
    st.builds(
        lambda prompt, outputs, tight, tenant, at, gone: (prompt, outputs, tight, tenant, at, gone),
        st.integers(1, 40),
        st.integers(10, 60),
        st.booleans(),
        st.sampled_from("ab"),
        st.integers(0, 60),
        st.none() | st.none() | st.integers(1, 200),
    ),
    min_size=6,
    max_size=14,
)
"""Decodes that don't all fit beside a tight one (four do), of tenants held close together."""


@pytest.mark.parametrize("depth", [0, 1])
@given(crowd=CROWD, blocks=st.sampled_from((40, 400)))
@settings(max_examples=40)
def test_pauses_of_running_requests_add_up_too(depth: int, crowd: list, blocks: int) -> None:
    bench = Bench(
        "kaiseki", depth, blocks=blocks, block_tokens=4, settings=SchedulerSettings(fairness_window=2)
    )
    watch = Watch(bench)
    bench.run(
        job(
            f"r{i}",
            prompt,
            outputs,
            START_NS + at * MS,
            START_NS + (at + gone) * MS if gone else None,
            tenant=tenant,
            cls=TIGHT if tight else ServiceClass(),
        )
        for i, (prompt, outputs, tight, tenant, at, gone) in enumerate(crowd)
    )
    for name, served in bench.served.items():
        told = bench.driver.explain(name)
        assert told is not None and served.outcome != Outcome.OPEN
        assert sum(w["ms"] for w in told["waits"]) == pytest.approx(told["total_wait_ms"], abs=0.05)
        assert abs(told["total_wait_ms"] * MS - watch.wait_ns(name)) <= longest_slot_ns(bench) + 1000


def test_a_pause_that_ends_in_a_preemption_counts_too() -> None:
    history, trace = History(), Trace()
    history.opened(Story(job("r", 10, 5, at_ns=0).request, seq=7))
    for slot, (t_ns, event, reason) in enumerate(
        (
            (0, Event.SUBMITTED, Reason.NONE),
            (10 * MS, Event.ADMITTED, Reason.SELECTED),
            (20 * MS, Event.PAUSED, Reason.NO_KV),
            (50 * MS, Event.PREEMPTED, Reason.FORCED_BY_GROWTH),
            (65 * MS, Event.ADMITTED, Reason.SELECTED),
            (90 * MS, Event.PAUSED, Reason.NO_TIME),
        )
    ):
        trace.note(slot, t_ns, np.array([7]), event, reason)
        history.slot(slot, t_ns, *trace.drain())
    told = explain(history, "r", now_ns=100 * MS)
    assert told is not None
    assert told["total_wait_ms"] == 10 + 30 + 15 + 10
    waits = {w["reason"]: w["ms"] for w in told["waits"]}
    assert waits["no_kv"] == 30 and waits["no_time"] == 10


def told_of(history: History, notes: list[tuple[int, Event, Reason]], cuts: dict[int, Reason]) -> dict:
    """What is said of request r, after such records of its own and such cutoffs, by time in ms."""
    history.opened(Story(job("r", 10, 5, at_ns=0).request, seq=7, tenant=0))
    trace = Trace()
    for slot, t in enumerate(sorted({t for t, *_ in notes} | cuts.keys())):
        for at, event, reason in notes:
            if at == t:
                trace.note(slot, t * MS, np.array([7]), event, reason)
        cut = [(slot, t * MS, 0, 0.0, -1, cuts[t], 0.0)] if t in cuts else []
        history.slot(slot, t * MS, trace.drain()[0], np.array(cut, CUTOFF))
    told = explain(history, "r", now_ns=100 * MS)
    assert told is not None
    return {w["reason"]: w["ms"] for w in told["waits"]}


def test_room_that_was_bought_in_vain_does_not_end_the_wait() -> None:
    notes = [
        (0, Event.SUBMITTED, Reason.NONE),
        (10, Event.ADMITTED, Reason.PURCHASED),
        (10, Event.PASSED_OVER, Reason.NO_TIME),
        (30, Event.ADMITTED, Reason.SELECTED),
    ]
    assert told_of(History(), notes, {}) == {"slot_running": 10, "no_time": 20}


def test_in_a_slot_in_which_it_was_looked_at_its_own_reason_counts() -> None:
    notes = [(0, Event.SUBMITTED, Reason.NONE), (10, Event.PASSED_OVER, Reason.NO_KV)]
    cuts = {0: Reason.NO_ROW, 10: Reason.BEHIND, 40: Reason.FAIR_SHARE}
    assert told_of(History(), notes, cuts) == {"no_row": 10, "no_kv": 30, "fair_share": 60}


def test_a_wait_whose_beginning_is_forgotten_is_told_whole() -> None:
    history = History(records=4)
    notes = [(0, Event.SUBMITTED, Reason.NONE), (10, Event.PASSED_OVER, Reason.NO_KV)]
    notes += [(20 + t, Event.PASSED_OVER, Reason.NO_ROW) for t in range(4)]
    assert sum(told_of(history, notes, {}).values()) == 100


def test_a_refused_request_is_explained_with_its_numbers() -> None:
    bench = Bench(blocks=4)
    bench.submit(job("big", 100, 100))
    bench.run()
    told = bench.driver.explain("big")
    assert told is not None
    assert told["outcome"] == "refused" and told["attained"] is False
    assert told["timeline"][0]["reason"] == "never_fits"
    assert "need_blocks 13" in told["summary"] and "pool_blocks 4" in told["summary"]
    assert bench.driver.explain("unknown") is None


def test_who_was_stopped_for_a_purchase_is_told_for_whom() -> None:
    loose = ServiceClass("loose", ttft_ns=20 * S, tbt_ns=200 * MS)
    urgent = ServiceClass("urgent", ttft_ns=60 * MS, tbt_ns=100 * MS, weight=8.0)
    bench = Bench("kaiseki", settings=SchedulerSettings(max_batch_size=2))
    jobs = [job("a", 20, 60, cls=loose), job("b", 20, 60, cls=loose)]
    bench.run([*jobs, job("vip", 20, 5, START_NS + 50 * MS, cls=urgent)])
    victims = [n for n in "ab" if bench.driver.history.story(n).ending.preemptions]  # type: ignore[union-attr]
    assert len(victims) == 1
    told = bench.driver.explain(victims[0])
    assert told is not None
    (stop,) = [e for e in told["timeline"] if e["event"] == "preempted"]
    assert stop["reason"] == "purchased" and "in favour of vip" in stop["detail"]
    assert "price" in stop["detail"]
    assert "preempted 1 times" in told["summary"]
    vip = bench.driver.explain("vip")
    assert vip is not None
    bought = [e for e in vip["timeline"] if e["reason"] == "purchased"]
    assert bought and "value" in bought[0]["detail"]


def test_a_wait_for_a_row_names_the_row() -> None:
    bench = Bench("fcfs", settings=SchedulerSettings(max_batch_size=1))
    bench.run([job("first", 50, 50), job("second", 50, 5)])
    told = bench.driver.explain("second")
    assert told is not None
    assert told["waits"][0]["reason"] == "no_row"
    assert told["waits"][0]["ms"] > 0.9 * told["total_wait_ms"]
    assert "max_batch_size" in told["counterfactuals"][0]


def test_the_last_request_is_told_to_its_end_though_nothing_runs_after_it() -> None:
    bench = Bench()
    bench.run([job("only", 20, 3)])
    told = bench.driver.explain("only")
    assert told is not None
    assert [e["event"] for e in told["timeline"]] == ["submitted", "admitted", "first_token", "finished"]


def test_a_fork_says_that_it_waited_for_its_sibling() -> None:
    bench = Bench("kaiseki", settings=SchedulerSettings(max_slot_tokens=64))
    bench.prompts.update({"a": list(range(1000)), "b": list(range(1000))})
    bench.run([job("a", 1000, 5), job("b", 1000, 5, fork_of="a")])
    told = bench.driver.explain("b")
    assert told is not None
    assert told["waits"][0]["reason"] == "held_for_fork"
