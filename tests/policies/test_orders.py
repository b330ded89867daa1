"""What sets apart the policies that people compare with: each test fails under another order."""

from __future__ import annotations

import numpy as np
import pytest
from tests.harness import MS, SMALL, START_NS, Bench, S, job

from kaiseki.core.fairness import Fairness
from kaiseki.core.protocols import Capabilities
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load


def firsts(bench: Bench) -> list[str]:
    """Names in order of their first token."""
    return sorted(bench.served, key=lambda name: bench.served[name].times_ns[0])


def chunks(bench: Bench) -> list[list[int]]:
    return [d.tokens.tolist() for d in bench.engine.decisions]


# ---------------------------------------------------------------------- orca


def test_orca_computes_each_prompt_in_one_piece_beside_decodes() -> None:
    bench = Bench(load("orca", budget_tokens=100), audit=True)
    bench.run([job("a", 60, 20), job("b", 90, 5), job("c", 30, 5, START_NS + MS)])
    bench.check_end()
    sizes = [size for slot in chunks(bench) for size in slot if size > 1]
    assert sorted(sizes) == [30, 60, 90]
    beside = next(slot for slot in chunks(bench) if 90 in slot)
    assert beside == [1, 90] or beside == [90, 1], "b joins the running a"


def test_orca_serves_in_order_of_arrival_and_nothing_overtakes_a_prompt_that_has_to_wait() -> None:
    bench = Bench(load("orca", budget_tokens=100), audit=True)
    bench.run([job("a", 60, 8), job("large", 100, 2), job("small", 10, 2)])
    assert firsts(bench) == ["a", "large", "small"]
    assert bench.served["large"].times_ns[0] > bench.served["a"].times_ns[-1], "100 don't fit beside a decode"


def test_orca_runs_a_prompt_over_the_budget_when_nothing_else_runs() -> None:
    bench = Bench(load("orca", budget_tokens=100), audit=True)
    bench.run([job("a", 500, 3)])
    assert chunks(bench)[0] == [500] and bench.served["a"].outcome == Outcome.COMPLETED


def test_orca_holds_the_batch_size() -> None:
    bench = Bench("orca", settings=SchedulerSettings(max_batch_size=2))
    bench.run([job(f"r{i}", 10, 4) for i in range(6)])
    assert max(len(slot) for slot in chunks(bench)) == 2


@pytest.mark.parametrize(("policy", "refused"), [("orca", True), ("sarathi", False)])
def test_what_may_need_more_than_a_step_is_refused_where_prompts_are_not_split(
    policy: str, refused: bool
) -> None:
    bench = Bench(policy, capabilities=Capabilities(max_step_tokens=64), audit=True)
    over = bench.submit(job("over", 60, 6))
    fits = bench.submit(job("fits", 60, 5))
    bench.run()
    bench.check_end()
    assert fits.outcome == Outcome.COMPLETED
    assert (over.outcome == Outcome.REFUSED) == refused
    if refused:
        assert over.end.reason == Reason.OVER_STEP
        assert over.end.numbers == {"tokens": 65, "prompt_tokens": 60, "max_step_tokens": 64}


def test_orca_never_exceeds_a_step_even_when_it_computes_again() -> None:
    capabilities = Capabilities(max_step_tokens=48)
    bench = Bench("orca", blocks=16, block_tokens=4, capabilities=capabilities, audit=True)
    bench.run([job(f"r{i}", 20, 29) for i in range(6)])
    bench.check_end()
    assert any(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    assert bench.scheduler.trace.drain()[0].size == 0
    stories = [bench.driver.history.story(name) for name in bench.served]
    assert any(story.ending.preemptions for story in stories), "the pool was meant to be too small"
    assert max(sum(slot) for slot in chunks(bench)) <= 48


# ---------------------------------------------------------------------- srpt


def test_srpt_serves_by_prompt_and_certain_output_together() -> None:
    bench = Bench("srpt", settings=SchedulerSettings(max_batch_size=1))
    bench.run([job("a", 500, 2), job("b", 10, 100), job("c", 300, 2), job("d", 20, 2)])
    order = sorted(bench.served, key=lambda name: bench.served[name].times_ns[-1])
    # 2 ms a decode, 0.05 ms a prompt token: 100 outputs take longer than any of these prompts.
    assert order == ["d", "c", "a", "b"]


def test_a_shorter_newcomer_overtakes_a_running_prefill_and_takes_nothing_from_it() -> None:
    bench = Bench(load("srpt", budget_tokens=64), audit=True)
    bench.run([job("long", 640, 2), job("short", 64, 2, START_NS + 6 * MS)])
    assert firsts(bench) == ["short", "long"]
    story = bench.driver.history.story("long")
    assert story is not None and story.ending is not None and story.ending.preemptions == 0


def test_srpt_goes_on_with_a_prefill_that_has_less_left_than_a_newcomer() -> None:
    bench = Bench(load("srpt", budget_tokens=64), audit=True)
    bench.run([job("long", 640, 2), job("late", 320, 2, START_NS + 40 * MS)])
    assert firsts(bench) == ["long", "late"], "640 tokens take 52 ms, less than 320 are left after 40"


@pytest.mark.parametrize(("fair", "starves"), [(False, True), (True, False)])
def test_srpt_starves_long_requests_unless_size_lanes_share(fair: bool, starves: bool) -> None:
    settings = SchedulerSettings(fairness_window=5, max_passes=10**6)
    policy = load("srpt", fair=fair, budget_tokens=64, starving_slots=10**6)
    bench = Bench(policy, settings=settings)
    jobs = [job(f"s{i:03}", 40, 1, START_NS + i * 3 * MS) for i in range(200)]
    bench.run([job("first", 40, 1), job("long", 400, 1), *jobs])
    place = firsts(bench).index("long")
    assert place == 201 if starves else place < 40, place


# ---------------------------------------------------------------------- vtc


def test_token_counters_count_what_was_served_once() -> None:
    bench = Bench("vtc", blocks=24, block_tokens=4, audit=True)
    jobs = [job(f"{t}{i}", 20, 20, tenant=t) for t in "ab" for i in range(3)]
    bench.run(jobs)
    bench.check_end()
    stories = [bench.driver.history.story(name) for name in bench.served]
    assert any(story.ending.preemptions for story in stories), "some were meant to be computed again"
    assert bench.scheduler.fairness.tokens.tolist() == [3 * (20 + 2 * 20)] * 2


def counted(requests: list[tuple[str, int]], rows: int) -> list[list[int]]:
    """Requests (tenant, prompt) of one output token each, as the paper's loop takes them: places by slot."""
    counters = dict.fromkeys((tenant for tenant, _ in requests), 0)
    queue, slots = list(range(len(requests))), []
    while queue:
        taken: list[int] = []
        while queue and len(taken) < rows:
            head = min(queue, key=lambda i: (counters[requests[i][0]], i))
            queue.remove(head)
            taken.append(head)
            counters[requests[head][0]] += requests[head][1]
        for i in taken:
            counters[requests[i][0]] += 2
        slots.append(sorted(taken))
    return slots


def test_the_tenant_with_the_least_counter_goes_first_and_each_admission_counts_at_once() -> None:
    rng = np.random.default_rng(3)
    requests = [("abc"[int(rng.integers(3))], int(rng.integers(5, 120))) for _ in range(40)]
    bench = Bench("vtc", settings=SchedulerSettings(max_batch_size=4))
    bench.run([job(f"{i:02}", prompt, 1, tenant=tenant) for i, (tenant, prompt) in enumerate(requests)])
    assert [sorted(map(int, slot)) for slot in by_slot(bench)] == counted(requests, 4)


def by_slot(bench: Bench) -> list[list[str]]:
    """Names by the time of their first token."""
    times = sorted({s.times_ns[0] for s in bench.served.values()})
    return [[n for n, s in bench.served.items() if s.times_ns[0] == at] for at in times]


def test_a_flood_does_not_delay_another_tenant_and_arrival_alone_would() -> None:
    def wait(policy: str) -> float:
        bench = Bench(policy, settings=SchedulerSettings(max_batch_size=2))
        flood = [job(f"f{i}", 100, 5, tenant="flood") for i in range(200)]
        bench.run([*flood, job("other", 100, 5, START_NS + 5 * MS, tenant="quiet")])
        return bench.served["other"].ttft_ns / MS

    assert wait("sarathi") > 1_000
    assert wait("vtc") < 60


def test_weights_of_tenants_share_tokens() -> None:
    bench = Bench("vtc", settings=SchedulerSettings(max_batch_size=1))
    bench.scheduler.set_tenant("big", 3.0)
    bench.run([job(f"{t}{i}", 50, 2, tenant=t) for t in ("big", "one") for i in range(40)], START_NS + S // 5)
    done = {
        t: sum(bool(s.endings) for n, s in bench.served.items() if n.startswith(t)) for t in ("big", "one")
    }
    assert done["one"] >= 5 and abs(done["big"] - 3 * done["one"]) <= 3


def test_who_returns_has_no_credit_in_tokens_either() -> None:
    fairness = Fairness(10)
    a, b, c = (fairness.tenant(n) for n in "abc")
    for tenant in (a, b):
        fairness.opened(tenant)
    fairness.count_tokens(np.array([a, b], np.int32), np.array([300, 500], np.int32), 1.0)
    fairness.opened(c)
    assert fairness.tokens[c] == 300.0, "the least of those with work"
    fairness.closed(np.array([c, a, b], np.int32))
    fairness.opened(c)
    assert fairness.tokens[c] == 500.0, "nobody has work: the last that left"


# ---------------------------------------------------------------------- urgency-match


def view_of(bench: Bench, names: list[str]):
    s = bench.scheduler
    rows = np.array([s.life.ids[name] for name in names], np.int32)
    return s.life.view(rows), s.waiting.keys(rows)


def scores(budget: int, *sizes: tuple[int, float, int]) -> list[int]:
    """Places in the order that the policy gives to (prompt, weight, TTFT in ms)."""
    policy = load("urgency-match", budget_tokens=budget)
    bench = Bench(policy)
    names = [f"r{i}" for i in range(len(sizes))]
    for name, (prompt, weight, ttft) in zip(names, sizes, strict=True):
        cls = ServiceClass(f"{weight} {ttft}", ttft_ns=ttft * MS, weight=weight)
        bench.scheduler.submit(job(name, prompt, 2, cls=cls).request, START_NS)
    view, keys = view_of(bench, names)
    return np.argsort(policy.rescore(view, keys, START_NS), kind="stable").tolist()


def test_a_slot_is_filled_by_urgency_per_token() -> None:
    assert scores(1000, (100, 1.0, 500), (20, 1.0, 500), (100, 8.0, 500), (100, 1.0, 9000)) == [2, 1, 0, 3]


def test_an_exchange_beats_the_densest_first() -> None:
    # Densities 1.2, 1.0, 0.9 per token; the first alone leaves 40 of 100 tokens unused.
    assert scores(100, (60, 72.0, 500), (50, 50.0, 500), (50, 45.0, 500)) == [1, 2, 0]


def test_what_exceeds_the_slot_counts_with_its_part() -> None:
    assert scores(100, (1000, 1000.0, 500), (100, 90.0, 500)) == [0, 1]
    assert scores(100, (1000, 800.0, 500), (100, 90.0, 500)) == [1, 0]


def test_urgency_match_prefers_the_due_to_the_loose_and_lets_cheap_ones_by() -> None:
    tight, loose = ServiceClass("tight", ttft_ns=30 * MS, weight=4.0), ServiceClass("loose", ttft_ns=20 * S)
    bench = Bench(load("urgency-match", budget_tokens=128), weights=SMALL, audit=True)
    bench.run([job("none", 128, 2), job("loose", 128, 2, cls=loose), job("tight", 128, 2, cls=tight)])
    bench.check_end()
    assert firsts(bench) == ["tight", "loose", "none"]
