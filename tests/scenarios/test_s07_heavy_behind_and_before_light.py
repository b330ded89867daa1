"""s07: 50 KV blocks are free; the queue needs 1,000, 10 and 10 of them.

Guards two rules: one that does not fit does not hold back those behind it that do, and one that was passed
over for long enough has the blocks it needs kept for it (docs/fairness.md, lack of room).
"""

from __future__ import annotations

import pytest
from tests.harness import MS, SMALL, START_NS, Bench, Job, S, job

from kaiseki.core.policy import Policy
from kaiseki.core.reasons import Outcome
from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

PAGE, POOL, FREE = 16, 1_050, 50
SETTINGS = SchedulerSettings(watermark_ratio=1.0, fairness_window=10, max_passes=16)
TARGET = ServiceClass("target", ttft_ns=900 * MS)
PLAIN = ServiceClass()
COMES = START_NS + 1 * S
COMING, EVERY_NS = 600, 25 * MS


def need(name: str, blocks: int, outputs: int, at_ns: int, cls: ServiceClass = PLAIN) -> Job:
    """A request that takes so many blocks in all, and nearly as many for its prompt."""
    return job(name, blocks * PAGE - outputs, outputs, at_ns, cls=cls)


def lights(count: int, every_ns: int) -> list[Job]:
    return [need(f"light{i}", 10, 60, COMES + i * every_ns) for i in range(count)]


def run(policy: Policy, jobs: list[Job], depth: int = 0) -> Bench:
    bench = Bench(policy, depth, blocks=POOL, block_tokens=PAGE, weights=SMALL, settings=SETTINGS)
    bench.run([*holders(), *jobs])
    bench.check_end()
    return bench


def holders() -> list[Job]:
    """Ten requests that hold all but the free blocks, and end one after the other."""
    return [need(f"holder{i}", (POOL - FREE) // 10, 300 + 30 * i, START_NS) for i in range(10)]


def last_holder_ns(bench: Bench) -> int:
    return max(s.times_ns[-1] for name, s in bench.served.items() if name.startswith("holder"))


def admitted_ns(bench: Bench, name: str) -> int:
    story = bench.driver.history.story(name)
    assert story is not None and story.ending is not None
    return story.ending.admitted_ns


@pytest.mark.parametrize("depth", [0, 1])
def test_the_light_ones_run_at_once(depth: int) -> None:
    bench = run(load("kaiseki"), [need("heavy", 1_000, 10, COMES), *lights(2, 0)], depth)
    slots = max(r.ended_ns - r.started_ns for r in bench.engine.results if r.started_ns >= COMES)
    for name in ("light0", "light1"):
        assert admitted_ns(bench, name) - COMES <= (depth + 1) * slots
    assert admitted_ns(bench, "heavy") >= last_holder_ns(bench)
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())


def test_a_bare_queue_keeps_them_behind_the_heavy_one() -> None:
    bench = run(load("fcfs"), [need("heavy", 1_000, 10, COMES), *lights(2, 0)])
    assert admitted_ns(bench, "light0") >= last_holder_ns(bench)


@pytest.mark.parametrize("cls", [PLAIN, TARGET], ids=["plain", "demoted"])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_heavy_one_is_not_starved_by_light_ones_that_go_on_coming(depth: int, cls: ServiceClass) -> None:
    """Some ten of them hold 100 blocks at any time, so that the heavy one never finds its 1,000."""
    stream = lights(COMING, EVERY_NS)
    bench = run(load("kaiseki"), [need("heavy", 1_000, 10, COMES, cls), *stream], depth)
    story = bench.driver.history.story("heavy")
    assert story is not None and story.ending is not None
    assert story.ending.demoted == (cls is TARGET)
    longest = max(s.times_ns[-1] - s.times_ns[0] for n, s in bench.served.items() if n.startswith("light"))
    # Sixteen may pass it, or H of service; then nothing new starts before it, and what runs ends.
    passes = SETTINGS.max_passes * EVERY_NS + bench.scheduler.fairness.hard_lag_ns
    bound = max(COMES + passes, last_holder_ns(bench)) + longest
    assert admitted_ns(bench, "heavy") <= bound
    assert bound < stream[-1].request.arrival_ns - 5 * S, "it would go in because the stream ends"
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
