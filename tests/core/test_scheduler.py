"""Rules that only show over several slots."""

from __future__ import annotations

import numpy as np
import pytest
from tests.harness import BUILT_IN, MS, START_NS, Bench, S, hashes, job, prompt_ids

from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

LOOSE = ServiceClass("loose", ttft_ns=20 * S, tbt_ns=200 * MS)
URGENT = ServiceClass("urgent", ttft_ns=150 * MS, tbt_ns=100 * MS, weight=8.0)


def events(bench: Bench, event: Event) -> np.ndarray:
    records = bench.driver.history.records.read()
    return records[records["event"] == event]


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_slot_may_be_decided_before_anybody_came(policy: str) -> None:
    bench = Bench(policy)
    assert bench.scheduler.decide(START_NS).empty
    bench.run([job("first", 20, 3)])
    bench.check_end()


def test_the_champion_is_never_stopped_though_stopping_it_would_cost_least() -> None:
    bench = Bench("kaiseki", blocks=40, block_tokens=4, audit=True)
    # The oldest holds most blocks, so its loss per block freed is the smallest.
    bench.run([job("oldest", 80, 40), *(job(f"r{i}", 8, 60, START_NS + MS) for i in range(5))])
    bench.check_end()
    assert events(bench, Event.PREEMPTED).size > 0, "the pool was meant to be too small"
    story = bench.driver.history.story("oldest")
    assert story is not None and story.ending is not None and story.ending.preemptions == 0


def test_a_decode_that_lacks_one_block_gets_it_at_once() -> None:
    bench = Bench("kaiseki", blocks=3, audit=True, settings=SchedulerSettings(watermark_ratio=1.0))
    bench.run([job("long", 30, 16), job("short", 2, 14, START_NS + MS)])
    bench.check_end()
    stopped = events(bench, Event.PREEMPTED)
    assert [bench.driver.history.name_of(int(seq)) for seq in stopped["seq"]] == ["short"]
    gaps = bench.served["long"].gaps_ns
    assert max(gaps) < 2 * min(gaps), "it waited for a block that another could give up"


def idle_slots(bench: Bench, seq: int) -> int:
    """Most slots in a row in which a request that was begun got nothing, until its first token."""
    row_of = bench.driver.history.name_of(seq)
    assert row_of is not None
    most = idle = 0
    for decision, result in zip(bench.engine.decisions, bench.engine.results, strict=True):
        if 0 in decision.rows:  # the first request has the first row as long as it is open
            idle = 0
        elif result.ended_ns < bench.served[row_of].times_ns[0]:
            idle += 1
        most = max(most, idle)
    return most


def test_the_champions_prompt_gets_its_next_block_at_once() -> None:
    """Without decodes to grow there is a shortage all the same, which someone else must end."""
    settings = SchedulerSettings(watermark_ratio=1.0, max_slot_tokens=3, quantum_tokens=4)
    bench = Bench("kaiseki", blocks=13, block_tokens=4, audit=True, settings=settings)
    bench.run([job("long", 44, 1), job("urgent", 4, 30, START_NS + 1, cls=LOOSE)])
    bench.check_end()
    stopped = events(bench, Event.PREEMPTED)
    assert [bench.driver.history.name_of(int(seq)) for seq in stopped["seq"]] == ["urgent"]
    assert idle_slots(bench, 0) <= 1


def test_a_champion_that_others_outrank_in_every_slot_is_served_all_the_same() -> None:
    settings = SchedulerSettings(max_slot_tokens=16)
    bench = Bench(load("kaiseki", starving_slots=8), settings=settings, audit=True)
    urgent = [job(f"u{i}", 16, 1, START_NS + 1, cls=LOOSE) for i in range(60)]
    bench.run([job("oldest", 64, 1), *urgent])
    bench.check_end()
    assert 8 <= idle_slots(bench, 0) <= 9
    assert bench.served["oldest"].times_ns[0] < bench.served["u59"].times_ns[0]


def test_decodes_pause_once_their_tenant_is_further_ahead_than_h() -> None:
    """They go before prompts, so without that the tenant whose requests all decode would run away."""
    settings = SchedulerSettings(fairness_window=3, max_slot_tokens=44)
    bench = Bench("kaiseki", settings=settings)
    streams = [job(f"s{i}", 4, 300, tenant="streams") for i in range(40)]
    prompts = [job(f"p{i}", 2000, 1, START_NS + 50 * MS, tenant="prompts") for i in range(20)]
    worst, slot_ns = 0.0, 0

    def look(bench: Bench) -> None:
        nonlocal worst, slot_ns
        fair = bench.scheduler.fairness
        slot_ns = max(slot_ns, *(r.ended_ns - r.started_ns for r in bench.engine.results[-1:]), 0)
        worst = max(worst, fair.gap_ns() - fair.hard_lag_ns)

    bench.each_slot = look
    bench.run([*streams, *prompts], until_ns=START_NS + 1500 * MS)
    assert events(bench, Event.PAUSED).size > 0, "nobody got that far ahead"
    assert worst <= 2 * slot_ns


def test_a_slot_smaller_than_the_grid_of_chunks_is_used_all_the_same() -> None:
    bench = Bench("kaiseki", settings=SchedulerSettings(max_slot_tokens=3), audit=True)
    bench.run([job("a", 20, 2), job("b", 7, 2, START_NS + 1)])
    bench.check_end()


def test_what_a_prompt_in_parts_still_needs_is_not_given_to_a_newcomer() -> None:
    settings = SchedulerSettings(watermark_ratio=1.0, max_slot_tokens=16)
    bench = Bench("kaiseki", blocks=20, block_tokens=4, audit=True, settings=settings)
    bench.run([job("long", 60, 1), job("urgent", 30, 1, START_NS + MS, cls=LOOSE)])
    bench.check_end()
    assert bench.served["urgent"].times_ns[0] > bench.served["long"].times_ns[0]
    assert events(bench, Event.PREEMPTED).size == 0


def test_a_purchased_row_may_be_the_parent_of_a_waiting_fork() -> None:
    """The fork can't share what its sibling has just lost; it must compute the prompt itself."""
    settings = SchedulerSettings(slo_lambda=100.0, fairness_window=1)
    bench = Bench("kaiseki", blocks=40, block_tokens=4, settings=settings, audit=True)
    ids = prompt_ids(0, 0, 1, 80)
    bench.prompts.update({"parent": ids, "fork": ids})
    jobs = [
        job("first", 40, 40, cls=LOOSE),
        job("parent", 80, 40, cls=LOOSE),
        # By now live blocks are at the watermark: the fork waits beside the one who buys.
        job("fork", 80, 10, START_NS + 24 * MS, cls=LOOSE, fork_of="parent"),
        job("urgent", 20, 10, START_NS + 27 * MS, cls=URGENT),
    ]
    bench.run(jobs)
    bench.check_end()
    history = bench.driver.history
    bought = events(bench, Event.PREEMPTED)
    bought = bought[bought["reason"] == Reason.PURCHASED]
    assert [history.name_of(int(seq)) for seq in bought["seq"]] == ["parent"]
    passed = events(bench, Event.PASSED_OVER)
    assert "fork" in [history.name_of(int(seq)) for seq in passed["seq"]], "the fork was meant to wait"
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())


def test_forks_share_the_prompt_of_their_sibling() -> None:
    bench = Bench("kaiseki", block_tokens=16, audit=True)
    ids = prompt_ids(0, 0, 1, 100)
    names = ["a", "a.1", "a.2"]
    bench.prompts.update(dict.fromkeys(names, ids))
    bench.run([job("a", 100, 30), *(job(n, 100, 30, fork_of="a") for n in names[1:])])
    bench.check_end()
    computed = sum(int(d.tokens.sum()) for d in bench.engine.decisions)
    assert computed == 100 + 2 * 1 + 3 * 29, "the prompt was to be computed once"


def test_a_cached_prefix_is_not_computed_again() -> None:
    bench = Bench("fcfs", audit=True)
    a, b = prompt_ids(7, 96, 1, 100), prompt_ids(7, 96, 2, 120)
    bench.prompts.update(a=a, b=b)
    bench.run([job("a", 100, 3, block_hashes=hashes(a, 16))])
    done = len(bench.engine.decisions)
    bench.run([job("b", 120, 3, bench.clock.now_ns(), block_hashes=hashes(b, 16))])
    bench.check_end()
    assert bench.served["b"].cached_tokens == 96
    assert sum(int(d.tokens.sum()) for d in bench.engine.decisions[done:]) == 24 + 2


@pytest.mark.parametrize("depth", [0, 1])
def test_a_purchase_does_not_stall_the_streams_beside_it(depth: int) -> None:
    """The newcomer's prompt gets what time the bound decodes leave, not the other way round."""
    settings = SchedulerSettings(max_batch_size=6, slo_lambda=100.0)
    bench = Bench("kaiseki", depth, settings=settings)
    steady = ServiceClass("steady", ttft_ns=20 * S, tbt_ns=8 * MS)
    jobs = [job(f"s{i}", 20, 150, cls=steady) for i in range(6)]
    bench.run(
        [*jobs, job("urgent", 3000, 5, START_NS + 100 * MS, cls=ServiceClass("u", 400 * MS, weight=8.0))]
    )
    bench.check_end()
    bought = events(bench, Event.PREEMPTED)
    victims = {bench.driver.history.name_of(int(s)) for s in bought["seq"]}
    assert len(victims) == 1
    for name, served in bench.served.items():
        if name not in victims | {"urgent"}:
            assert max(served.gaps_ns) <= steady.tbt_ns, f"{name} stalled"


@pytest.mark.parametrize(("prompt", "bought"), [(161, 0), (176, 1)])
def test_a_newcomer_that_wastes_a_block_has_to_be_worth_it(prompt: int, bought: int) -> None:
    """With a high mu a purchase is refused to who fills one token of a block, not to who fills it all."""
    settings = SchedulerSettings(max_batch_size=4, slo_lambda=10.0, kv_mu=1000.0)
    bench = Bench("kaiseki", block_tokens=16, settings=settings)
    steady = ServiceClass("steady", ttft_ns=20 * S, tbt_ns=50 * MS)
    urgent = ServiceClass("u", ttft_ns=120 * MS, weight=8.0)
    jobs = [job(f"s{i}", 32, 400, cls=steady) for i in range(4)]
    bench.run([*jobs, job("urgent", prompt, 2, START_NS + 100 * MS, cls=urgent)])
    stopped = events(bench, Event.PREEMPTED)
    assert np.count_nonzero(stopped["reason"] == Reason.PURCHASED) == bought


def test_prefill_starves_only_when_there_was_prefill_to_do() -> None:
    """Decodes that ran by themselves for long owe nothing to a prompt that has just come."""
    cls = ServiceClass("tight", ttft_ns=20 * S, tbt_ns=3 * MS)
    bench = Bench(load("kaiseki", starving_slots=8))
    late = job("late", 200, 2, START_NS + 100 * MS)
    bench.run([job(f"s{i}", 16, 120, cls=cls) for i in range(9)] + [late])
    bench.check_end()
    when = [d.slot for d in bench.engine.decisions if d.samples.sum() < d.rows.size]
    arrived = next(
        d.slot for d, r in zip(bench.engine.decisions, bench.engine.results, strict=True)
        if r.started_ns >= late.request.arrival_ns
    )  # fmt: skip
    first = min(s for s in when if s >= arrived)
    assert first >= arrived + 8


def test_a_request_is_demoted_once_and_still_served() -> None:
    cls = ServiceClass("hurry", ttft_ns=20 * MS)
    bench = Bench("kaiseki", audit=True)
    bench.run([job(f"r{i}", 200, 5, cls=cls) for i in range(8)])
    bench.check_end()
    demoted = events(bench, Event.DEMOTED)
    assert demoted.size == len(set(demoted["seq"].tolist())) > 0
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    assert sum(s.end.demoted for s in bench.served.values()) == demoted.size
