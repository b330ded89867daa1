"""s15: four LoRA slots, all in use; five requests for a fifth adapter are at the head of the queue.

Guards that what can't have its adapter takes nobody's place: requests for the base model and for loaded
adapters that come behind it run meanwhile.
"""

from __future__ import annotations

import pytest
from tests.harness import MS, START_NS, Bench, Job, S, job

from kaiseki.core.protocols import Capabilities
from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.core.settings import SchedulerSettings
from kaiseki.observe.explain import explain

LOADED = ("one", "two", "three", "four")
LOAD_NS = 8 * MS
FOUR_SLOTS = Capabilities(adapter_slots=4, adapter_load_ns=LOAD_NS)
COMES = START_NS + S
BEHIND = 8
FREE_ROWS = 3
"""Fewer than there are requests for the fifth adapter."""


def holders() -> list[Job]:
    return [job(f"holder-{name}", 60, 600, START_NS, adapter=name) for name in LOADED]


def jobs(fifths: int = 5) -> list[Job]:
    behind = [job(f"behind{i}", 40, 4, COMES + 1 + i, adapter=(None, *LOADED)[i % 5]) for i in range(BEHIND)]
    return [*holders(), *(job(f"fifth{i}", 40, 4, COMES, adapter="five") for i in range(fifths)), *behind]


def run(policy: str, depth: int = 0, fifths: int = 5) -> Bench:
    settings = SchedulerSettings(max_batch_size=4 + FREE_ROWS)
    bench = Bench(policy, depth, settings=settings, capabilities=FOUR_SLOTS)
    bench.run(jobs(fifths))
    bench.check_end()
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    return bench


def first_holder_ns(bench: Bench) -> int:
    return min(bench.served[f"holder-{name}"].times_ns[-1] for name in LOADED)


@pytest.mark.parametrize("fifths", [5, 300], ids=["five", "more than are looked at"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_those_behind_run_meanwhile(depth: int, fifths: int) -> None:
    bench = run("kaiseki", depth, fifths)
    slot = max(r.ended_ns - r.started_ns for r in bench.engine.results)
    for i in range(BEHIND):
        assert bench.served[f"behind{i}"].times_ns[-1] < COMES + 40 * (depth + 1) * slot
        assert bench.served[f"behind{i}"].times_ns[-1] < first_holder_ns(bench)
    first = min(bench.served[f"fifth{i}"].times_ns[0] for i in range(fifths))
    assert first > first_holder_ns(bench)


def test_a_strict_queue_keeps_them_behind() -> None:
    bench = run("fcfs")
    assert min(bench.served[f"behind{i}"].times_ns[0] for i in range(BEHIND)) > first_holder_ns(bench)


def test_the_first_of_those_that_wait_is_told_why() -> None:
    bench = run("kaiseki")
    told = explain(bench.driver.history, "fifth0", bench.clock.now_ns())
    assert told is not None
    assert told["waits"][0]["reason"] == Reason.ADAPTER.label
    passed = [e for e in told["timeline"] if e["event"] == Event.PASSED_OVER.label]
    assert passed and passed[0]["reason"] == Reason.ADAPTER.label


@pytest.mark.parametrize("policy", ["kaiseki", "fcfs"])
def test_without_adapter_slots_they_are_refused(policy: str) -> None:
    bench = Bench(policy)
    bench.run([job("a", 40, 4, adapter="one"), job("base", 40, 4)])
    refused = bench.served["a"]
    assert refused.outcome == Outcome.REFUSED and refused.end.reason == Reason.NO_ADAPTERS
    assert refused.end.numbers == {"adapter_slots": 0} and refused.end.retry_after_s is None
    assert bench.served["base"].outcome == Outcome.COMPLETED
