"""s01: 50 short chats are decoding, 512 tokens a step; one prompt of 130 K tokens arrives."""

from __future__ import annotations

import numpy as np
import pytest
from tests.harness import MS, START_NS, Bench, S, job

from kaiseki.core.policy import Policy
from kaiseki.core.reasons import Outcome
from kaiseki.core.requests import OnLate, ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

# 4 ms a slot, 0.05 ms a decode, 0.1 ms a prefill token and a little for attention.
CARD = np.array([4e6, 0.05e6, 0.0, 0.1e6, 2.0, 0.05, 0.0])
CHAT = ServiceClass("chat", ttft_ns=500 * MS, tbt_ns=70 * MS, weight=4.0)
LONG = ServiceClass("long", deadline_ns=600 * S, on_late=OnLate.KEEP, tier=1)
LONG_PROMPT, CHATS = 130_000, 50


def run(policy: Policy, depth: int) -> Bench:
    bench = Bench(policy, depth, weights=CARD, blocks=12_000, settings=SchedulerSettings(max_slot_tokens=512))
    jobs = [job(f"chat{i}", 60, 260, START_NS + i * MS, cls=CHAT) for i in range(CHATS)]
    jobs.append(job("long", LONG_PROMPT, 4, START_NS + 2 * S, tenant="other", cls=LONG))
    jobs.append(job("newcomer", 100, 10, START_NS + 4 * S, cls=CHAT))
    bench.run(jobs)
    bench.check_end()
    return bench


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [512, None], ids=["budget", "time-bound"])
def test_chats_go_on_and_a_newcomer_does_not_wait_for_it(budget: int | None, depth: int) -> None:
    bench = run(load("kaiseki", budget_tokens=budget), depth)
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    chats = [bench.served[f"chat{i}"] for i in range(CHATS)]
    for chat in chats:
        assert max(chat.gaps_ns) <= CHAT.tbt_ns, f"{chat.job.request.id} stalled"
    newcomer, long = bench.served["newcomer"], bench.served["long"]
    assert newcomer.ttft_ns <= CHAT.ttft_ns
    assert newcomer.times_ns[-1] < long.times_ns[0], "it waited for the long prompt"
    # While the long prompt is computed, no slot goes by without tokens for those who decode.
    for decision, result in zip(bench.engine.decisions, bench.engine.results, strict=True):
        if long.job.request.arrival_ns < result.ended_ns < chats[0].times_ns[-1]:
            assert result.new_tokens.sum() >= CHATS - 10
            assert decision.tokens.sum() <= 512


def test_a_bare_queue_keeps_the_newcomer_behind_the_long_prompt() -> None:
    """Running requests by admission: the long prompt takes all that a step has left."""
    bench = run(load("fcfs", budget_tokens=512), 0)
    newcomer, long = bench.served["newcomer"], bench.served["long"]
    assert newcomer.times_ns[0] >= long.times_ns[0]
    assert newcomer.ttft_ns > 10 * CHAT.ttft_ns
