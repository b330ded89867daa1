"""s14: one slot for LoRA adapters; a request for adapter B, and before and behind it A, A, A ... endlessly.

Guards that a slot is kept for an adapter that was passed over too often: as long as requests for A go on
coming, there is always one that runs, and A is never unpinned by itself.
"""

from __future__ import annotations

import pytest
from tests.harness import MS, START_NS, Bench, Job, S, job

from kaiseki.core.protocols import Capabilities
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.settings import SchedulerSettings
from kaiseki.observe.explain import explain

PASSES = 16
LOAD_NS = 8 * MS
ONE_SLOT = Capabilities(adapter_slots=1, adapter_load_ns=LOAD_NS)
COMING, EVERY_NS = 120, 25 * MS
COMES = START_NS + 500 * MS


def stream() -> list[Job]:
    """Some five of them run at any time."""
    return [job(f"a{i}", 60, 40, START_NS + i * EVERY_NS, adapter="A") for i in range(COMING)]


def run(depth: int, passes: int = PASSES, after: list[Job] | None = None) -> Bench:
    settings = SchedulerSettings(max_passes=passes)
    bench = Bench("kaiseki", depth, settings=settings, capabilities=ONE_SLOT)
    bench.run([*stream(), job("b", 60, 40, COMES, adapter="B"), *(after or [])])
    bench.check_end()
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    return bench


def admitted_ns(bench: Bench, name: str) -> int:
    story = bench.driver.history.story(name)
    assert story is not None and story.ending is not None
    return story.ending.admitted_ns


def loads(bench: Bench) -> list[str]:
    names = bench.scheduler.adapters.names
    return [names[a] for d in bench.engine.decisions for a in d.loads[:, 0].tolist()]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_b_runs_within_the_bound(depth: int) -> None:
    bench = run(depth)
    spans = [s.times_ns[-1] - s.times_ns[0] for name, s in bench.served.items() if name.startswith("a")]
    slots = max(r.ended_ns - r.started_ns for r in bench.engine.results)
    # Sixteen decisions that admit others may pass it; then what runs ends, and steps in flight retire.
    bound = PASSES * EVERY_NS + max(spans) + (2 * depth + 2) * slots
    assert admitted_ns(bench, "b") - COMES <= bound
    assert loads(bench) == ["A", "B", "A"], "once it has run, A has the slot again"
    assert bench.served["b"].times_ns[-1] < COMES + S < bench.served[f"a{COMING - 1}"].times_ns[-1] - S


def test_while_b_waits_it_is_told_why() -> None:
    bench = run(0)
    told = explain(bench.driver.history, "b", bench.clock.now_ns())
    assert told is not None
    assert told["waits"][0]["reason"] == Reason.ADAPTER.label
    assert Reason.ADAPTER.sentence in told["summary"]


@pytest.mark.parametrize("depth", [0, 1])
def test_without_the_bound_it_starves(depth: int) -> None:
    bench = run(depth, passes=2**30)
    assert admitted_ns(bench, "b") > bench.served[f"a{COMING - 1}"].times_ns[0]


def test_with_fcfs_everybody_waits_behind_it() -> None:
    """A strict queue does not starve it, but nothing passes it while the slot drains."""
    bench = Bench("fcfs", capabilities=ONE_SLOT)
    base = job("base", 60, 4, COMES + 1)
    bench.run([*stream(), job("b", 60, 40, COMES, adapter="B"), base])
    assert admitted_ns(bench, "base") >= admitted_ns(bench, "b")
    ours = run(0, after=[base])
    assert admitted_ns(ours, "base") < admitted_ns(ours, "b")
