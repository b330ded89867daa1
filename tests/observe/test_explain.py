"""Why a request waited: the parts add up, and name who was preferred."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from tests.conformance.workloads import Workload, workloads
from tests.harness import MS, START_NS, Bench, S, job

from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.trace import Trace
from kaiseki.observe.explain import explain
from kaiseki.observe.history import History, Story


def measured_wait_ns(bench: Bench, name: str) -> int:
    """From the engine's side: time from entering the queue until the slot that starts it, and pauses.

    A pause lasts from a slot that gave a running request nothing, though it could have used a chunk, to
    the next that gives it one.
    """
    story = bench.driver.history.story(name)
    assert story is not None and story.ending is not None
    records = bench.driver.history.records.read()
    total, since = 0, None
    for record in records[records["seq"] == story.seq]:
        event = Event(int(record["event"]))
        if event == Event.SUBMITTED:
            since = story.request.arrival_ns
        elif event in (Event.PREEMPTED, Event.RETRIED, Event.PAUSED):
            since = int(record["t_ns"]) if since is None else since
        elif since is not None and event in (Event.ADMITTED, Event.RESUMED):
            total, since = total + int(record["t_ns"]) - since, None
    return total + (story.ending.ended_ns - since if since is not None else 0)


@pytest.mark.parametrize("policy", ["fcfs", "kaiseki"])
@given(work=workloads())
@settings(max_examples=25)
def test_attributed_waits_add_up_to_the_measured_wait(policy: str, work: Workload) -> None:
    bench = work.bench(policy, 0, True)
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
        slots = [r.ended_ns - r.started_ns for r in bench.engine.results] or [0]
        assert abs(told["total_wait_ms"] * MS - measured_wait_ns(bench, name)) <= max(slots) + 1
        assert all(w["reason"] != "none" for w in told["waits"])
        assert told["timeline"][0]["event"] == "submitted"
        assert told["timeline"][-1]["event"] in ("finished", "expired", "failed", "cancelled")
        assert told["outcome"] == served.outcome.label


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
