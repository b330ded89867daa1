"""A request that begins on one replica and goes on at another, with its KV."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.harness import LARGE, MS, SMALL, START_NS, Bench, check_consistent, hashes, job, prompt_ids

from kaiseki.core.decision import Decision, StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.protocols import Capabilities, OutOfBlocks
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.requests import Begun, OnLate, Request, ServiceClass
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import State
from kaiseki.cost.online import FixedLinear
from kaiseki.memory.pool import BlockPool
from kaiseki.policies.registry import load as policy

CHAT = ServiceClass("chat", ttft_ns=100 * MS, tbt_ns=50 * MS)


class Replica:
    """A scheduler whose steps take 10 ms and give every sampling row its token."""

    def __init__(self, blocks: int = 100, name: str = "kaiseki") -> None:
        self.pool = BlockPool(blocks, 16)
        self.s = Scheduler(
            policy(name), self.pool, FixedLinear(SMALL), Capabilities(placeholders=False), SchedulerSettings()
        )
        self.now = START_NS
        self.endings: dict[str, Ending] = {}
        self.starts: list[tuple[int, int]] = []

    def step(self) -> Decision:
        decision = self.s.decide(self.now)
        self.now += 10 * MS
        self.starts += zip(decision.starts.tolist(), decision.tokens.tolist(), strict=True)
        if not decision.empty:
            n = decision.rows.size
            none, samples = np.zeros(n, np.bool_), decision.samples
            self.s.apply(
                StepResult(
                    decision.slot, decision.rows, decision.epochs, samples.astype(np.int32),
                    np.zeros(int(samples.sum()), np.int32), np.zeros(n, np.int8), none, none,
                    self.now - 10 * MS, self.now,
                )
            )  # fmt: skip
        self.endings |= {ending.request_id: ending for ending in self.s.take_endings()}
        self.pool.check()
        return decision

    def run(self) -> None:
        while self.s.table.open_rows:
            assert not self.step().empty

    def assert_empty(self) -> None:
        assert self.s.table.open_rows == 0 and not self.s.life.ids
        assert self.pool.free_blocks() == self.pool.total_blocks


def begun(name: str, prompt: int, tokens: int, **more: object) -> Request:
    """A request whose first token came 20 ms ago."""
    made = Request(name, prompt, tokens, cls=CHAT, arrival_ns=START_NS - 60 * MS)
    return replace(made, begun=Begun(START_NS - 20 * MS), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [1, 15, 16, 100])
def test_only_the_position_behind_the_prompt_is_computed(prompt: int) -> None:
    replica = Replica()
    assert replica.s.submit(begun("a", prompt, 4), replica.now) is None
    assert replica.step().empty and replica.pool.live_blocks() == prompt // 16 + 1
    replica.s.landed("a", replica.now)
    replica.run()
    assert replica.starts == [(prompt, 1), (prompt + 1, 1), (prompt + 2, 1)]
    ending = replica.endings["a"]
    assert (ending.outcome, ending.outputs, ending.cached, ending.late_gaps) == (Outcome.COMPLETED, 4, 0, 0)
    assert ending.first_token_ns == START_NS - 20 * MS and ending.attained
    assert replica.s.life.prefix_queried == 0
    replica.assert_empty()


@pytest.mark.parametrize("sent", [True, False])
def test_it_goes_on_with_the_tokens_it_has_and_with_or_without_their_kv(sent: bool) -> None:
    replica = Replica()
    past = Begun(START_NS - 50 * MS, False, 7, START_NS - 20 * MS, 2, sent=sent)
    replica.s.submit(replace(begun("a", 100, 10), begun=past), replica.now)
    if sent:
        assert replica.step().empty and replica.pool.live_blocks() == 7  # 107 positions
        replica.s.landed("a", replica.now)
    replica.run()
    first = (106, 1) if sent else (0, 107)
    assert replica.starts == [first, (107, 1), (108, 1)]
    ending = replica.endings["a"]
    assert (ending.outputs, ending.late_gaps, ending.first_token_ns) == (10, 2, START_NS - 50 * MS)
    replica.assert_empty()


def test_targets_are_judged_over_the_whole_life() -> None:
    slow = Replica()
    slow.s.submit(begun("a", 100, 4), slow.now)
    slow.now += 40 * MS  # the first gap is 70 ms; one late gap is allowed
    slow.s.landed("a", slow.now)
    slow.run()
    assert slow.endings["a"].late_gaps == 1 and slow.endings["a"].attained
    late = Replica()
    late.s.submit(replace(begun("a", 100, 4), begun=Begun(START_NS + 41 * MS)), late.now)
    late.s.landed("a", late.now)
    late.run()
    assert late.endings["a"].first_token_ns - late.endings["a"].arrival_ns == 101 * MS
    assert not late.endings["a"].attained


def test_who_was_best_effort_stays_it() -> None:
    replica = Replica()
    replica.s.submit(replace(begun("a", 100, 4), begun=Begun(START_NS, demoted=True)), replica.now)
    replica.s.landed("a", replica.now)
    replica.run()
    assert replica.endings["a"].demoted and not replica.endings["a"].attained


def test_after_a_preemption_all_is_computed_here() -> None:
    replica = Replica()
    replica.s.submit(begun("a", 100, 6), replica.now)
    replica.s.landed("a", replica.now)
    replica.step()
    row = np.array([replica.s.life.ids["a"]], np.int32)
    replica.s.life.preempt(row, 4, Reason.FORCED_BY_GROWTH, replica.now)  # type: ignore[arg-type]
    replica.run()
    assert replica.starts[0] == (100, 1) and replica.starts[1] == (0, 102)
    assert replica.endings["a"].outputs == 6 and replica.endings["a"].preemptions == 1
    replica.assert_empty()


@pytest.mark.parametrize("lands", [False, True])
def test_a_cancelled_one_leaves_nothing(lands: bool) -> None:
    replica = Replica()
    replica.s.submit(begun("a", 100, 6), replica.now)
    if lands:
        replica.s.landed("a", replica.now)
    assert replica.s.cancel("a", replica.now)
    assert [e.outcome for e in replica.s.take_endings()] == [Outcome.CANCELLED]
    replica.assert_empty()
    replica.pool.check()


def test_kv_without_room_is_not_taken() -> None:
    replica = Replica(blocks=10)
    first, second = begun("a", 80, 20), begun("b", 80, 20)
    assert replica.s.has_room(first)
    replica.s.submit(first, replica.now)
    assert not replica.s.has_room(second)
    with pytest.raises(OutOfBlocks):
        replica.s.submit(second, replica.now)
    replica.s.landed("a", replica.now)
    replica.run()
    replica.assert_empty()


def test_kv_that_is_here_may_run_though_the_pool_has_filled_up() -> None:
    replica = Replica(blocks=20)
    replica.s.submit(Request("old", 200, 60), replica.now)
    replica.s.submit(begun("a", 15, 5), replica.now)
    while replica.pool.live_blocks() <= 16:  # 0.8 of the pool
        replica.step()
    replica.s.landed("a", replica.now)
    replica.step()
    assert replica.s.table.state[replica.s.life.ids["a"]] == State.RUNNING
    replica.run()
    assert {e.outcome for e in replica.endings.values()} == {Outcome.COMPLETED}
    replica.assert_empty()


def test_kv_that_waits_leaves_room_for_whoever_must_be_able_to_finish() -> None:
    replica = Replica(blocks=20)
    replica.s.submit(Request("old", 10, 230), replica.now)  # 15 of 20 blocks in the end
    replica.step()
    assert replica.s.has_room(begun("fits", 70, 2))
    assert not replica.s.has_room(begun("over", 85, 2))
    assert not Replica(blocks=20).s.has_room(begun("never", 300, 30))
    assert Replica(blocks=20).s.has_room(begun("alone", 290, 20))


def test_no_queue_limit_and_no_ttft_counts_for_what_has_begun() -> None:
    strict = ServiceClass("strict", ttft_ns=1, tbt_ns=50 * MS, on_late=OnLate.EXPIRE)
    replica = Replica()
    replica.s.settings = SchedulerSettings(max_waiting_tokens=10)
    assert replica.s.submit(replace(begun("a", 100, 3), cls=strict), replica.now) is None
    replica.s.landed("a", replica.now)
    replica.run()
    assert replica.endings["a"].outcome == Outcome.COMPLETED


def test_kv_that_is_handed_over_stays_until_it_is_let_go() -> None:
    replica = Replica()
    replica.s.submit(Request("a", 100, 1, hands_over=True), replica.now)
    replica.step()
    assert replica.endings["a"].outcome == Outcome.COMPLETED
    assert replica.pool.live_blocks() == 7 and not replica.s.cancel("a", replica.now)
    assert replica.s.table.state[replica.s.life.ids["a"]] == State.GOING
    assert replica.step().empty and replica.pool.live_blocks() == 7
    replica.s.handed_over("a")
    replica.assert_empty()


def test_what_fails_or_is_cancelled_before_that_keeps_nothing() -> None:
    replica = Replica()
    replica.s.submit(Request("a", 100, 1, hands_over=True), replica.now)
    replica.s.cancel("a", replica.now)
    replica.assert_empty()


def test_pages_of_handed_over_prompts_are_found_by_others() -> None:
    ids = prompt_ids(0, 64, 1, 100)
    replica = Replica()
    for name in ("a", "b"):
        request = Request(name, 100, 1, block_hashes=hashes(ids, 16), hands_over=True)
        replica.s.submit(request, replica.now)
        replica.step()
    assert replica.starts == [(0, 100), (96, 4)]


def test_the_driver_of_a_server_serves_beside_kv_that_comes() -> None:
    bench = Bench(blocks=69, weights=LARGE)
    bench.scheduler.submit(begun("coming", 300, 5), bench.clock.now_ns())
    served = bench.submit(job("here", 500, 20))
    for _ in range(40):
        bench.driver.step()
        check_consistent(bench.scheduler, bench.pool)
    assert served.outcome == Outcome.COMPLETED and bench.pool.live_blocks() == 19
