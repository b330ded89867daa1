"""Adapters as a resource: what is loaded when, what goes for it, who waits for it and who pays."""

from __future__ import annotations

import pytest
from tests.harness import MS, START_NS, Bench, job

from kaiseki.core.protocols import Capabilities
from kaiseki.core.reasons import Outcome
from kaiseki.core.requests import ServiceClass

LOAD_NS = 5 * MS


def bench(slots: int, depth: int = 0, policy: str = "kaiseki", load_ns: int = LOAD_NS) -> Bench:
    capabilities = Capabilities(adapter_slots=slots, adapter_load_ns=load_ns)
    return Bench(policy, depth, capabilities=capabilities, audit=True)


def loads(it: Bench) -> list[tuple[str, int]]:
    """Adapters in the order in which they were loaded, and the slot of each."""
    names = it.scheduler.adapters.names
    return [(names[a], slot) for d in it.engine.decisions for a, slot in d.loads.tolist()]


def in_turn(it: Bench, adapters: str) -> None:
    """One request after the other, each for one adapter."""
    for i, adapter in enumerate(adapters):
        it.run([job(f"r{len(it.served)}-{i}", 20, 3, it.clock.now_ns(), adapter=adapter)])


def test_an_adapter_stays_until_its_slot_is_needed_and_the_longest_unused_goes() -> None:
    it = bench(2)
    in_turn(it, "aababca")
    # c takes the place of a or b: a was used before b.
    assert loads(it) == [("a", 0), ("b", 1), ("c", 0), ("a", 1)]
    it.check_end()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("policy", ["kaiseki", "fcfs", "vtc", "static"])
def test_everybody_is_served_with_fewer_slots_than_adapters(policy: str, depth: int) -> None:
    it = bench(2, depth, policy)
    it.run([job(f"r{i}", 20 + i, 4, START_NS + i * MS, adapter="abcde"[i % 5]) for i in range(30)])
    it.check_end()
    assert all(s.outcome == Outcome.COMPLETED for s in it.served.values())
    assert not it.scheduler.adapters.records["pins"].any()


@pytest.mark.parametrize("depth", [0, 1])
def test_who_is_cancelled_needs_its_adapter_no_more(depth: int) -> None:
    it = bench(1, depth)
    cancelled = job("a", 20, 500, START_NS, cancel_ns=START_NS + 50 * MS, adapter="a")
    it.run([cancelled, job("b", 20, 3, START_NS + MS, adapter="b")])
    it.check_end()
    assert it.served["a"].outcome == Outcome.CANCELLED
    assert START_NS + 50 * MS < it.served["b"].times_ns[0] < START_NS + 100 * MS


def test_a_chunk_that_fails_gives_the_adapter_free() -> None:
    it = bench(1)
    it.run([job("a", 20, 3, adapter="a", breaks_at=10), job("b", 20, 3, adapter="b")])
    it.check_end()
    assert it.served["a"].outcome == Outcome.FAILED and it.served["b"].outcome == Outcome.COMPLETED


def test_a_load_is_predicted_and_paid_by_whom_it_is_done_for() -> None:
    it = bench(1)
    it.run([job("base", 20, 1, tenant="x"), job("lora", 20, 1, tenant="y", adapter="a")])
    (decision,) = (d for d in it.engine.decisions if d.loads.size)
    assert decision.rows.size == 2
    result = it.engine.results[0]
    assert decision.predicted_ns == result.ended_ns - result.started_ns
    names = it.scheduler.fairness.names
    x, y = (it.scheduler.fairness.counter[names.index(name)] for name in "xy")
    assert y - x == pytest.approx(LOAD_NS)
    assert x + y == pytest.approx(decision.predicted_ns)


def test_a_load_counts_against_the_bound_of_the_slot() -> None:
    """With 15 ms between tokens, some 200 tokens of a prompt fit a slot; a load of 10 ms leaves few."""
    it = bench(1, load_ns=10 * MS)
    chat = ServiceClass("chat", tbt_ns=15 * MS)
    late = job("late", 2_000, 2, START_NS + 50 * MS, adapter="a")
    it.run([job("chat", 20, 100, cls=chat), late])
    it.check_end()
    assert max(it.served["chat"].gaps_ns) <= 15 * MS
    (decision,) = (d for d in it.engine.decisions if d.loads.size)
    assert 0 < int(decision.tokens.max()) < 100


def test_a_load_that_no_bound_leaves_room_for_is_done_in_the_end() -> None:
    it = bench(1, load_ns=30 * MS)
    chat = ServiceClass("chat", tbt_ns=15 * MS)
    others = [job(f"base{i}", 20, 2, START_NS + i * 10 * MS) for i in range(400)]
    it.run([job("chat", 20, 800, cls=chat), job("a", 200, 2, START_NS + 50 * MS, adapter="a"), *others])
    it.check_end()
    assert it.served["a"].times_ns[0] < it.served["base399"].times_ns[0]
    assert sum(gap > 15 * MS for gap in it.served["chat"].gaps_ns) == 1


def test_of_two_alike_the_one_whose_adapter_is_loaded_goes_first() -> None:
    it = bench(1)
    in_turn(it, "a")
    now = it.clock.now_ns()
    it.run([job("b", 20, 3, now, adapter="b"), job("later", 20, 3, now, adapter="a")])
    assert it.served["later"].times_ns[0] < it.served["b"].times_ns[0]


def test_a_fork_with_another_adapter_shares_no_prompt() -> None:
    it = bench(2)
    prompt = list(range(40))
    it.prompts = {"parent": prompt, "same": prompt, "other": prompt}
    forks = [
        job("same", 40, 5, fork_of="parent", adapter="a"),
        job("other", 40, 5, fork_of="parent", adapter="b"),
    ]
    for one in (job("parent", 40, 5, adapter="a"), *forks):
        it.submit(one)
    it.run()
    it.check_end()
    assert sum(int(d.tokens[d.starts < 39].sum()) for d in it.engine.decisions) == 2 * 40


def test_a_step_with_a_load_teaches_the_cost_model_nothing() -> None:
    it = bench(1)
    seen: list[float] = []
    it.scheduler.cost.observe = lambda features, ns: seen.append(ns)  # type: ignore[method-assign]
    it.run([job("a", 20, 3, adapter="a")])
    assert len(seen) == len(it.engine.results) - 1 == 2


def test_queues_of_adapters_that_come_later_keep_their_order() -> None:
    it = bench(8)
    for i in range(12):
        it.submit(job(f"r{i}", 20, 2, START_NS + i, tenant="xy"[i % 2], adapter=f"adapter{i}"))
        it.driver.step()
    it.run()
    it.check_end()
    first = [it.served[f"r{i}"].times_ns[0] for i in range(8)]
    assert first == sorted(first)
