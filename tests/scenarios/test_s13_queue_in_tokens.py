"""s13: the queue is limited by tokens; 500 prompts of 8 K tokens arrive during one slot.

Guards `admission.queue_full`: what is over the limit is refused at submit, before the next slot and before
anything is spent on it. Over HTTP, with the estimate from bytes: `test_s13_http.py`.
"""

from __future__ import annotations

import pytest
from tests.harness import START_NS, Bench, job

from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.settings import SchedulerSettings

BURST, PROMPT, FIT = 500, 8_000, 5
LIMITED = SchedulerSettings(max_waiting_tokens=FIT * PROMPT)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "kaiseki"])
def test_what_is_over_the_limit_is_refused_before_the_next_slot(policy: str, depth: int) -> None:
    bench = Bench(policy, depth=depth, blocks=8192, settings=LIMITED)
    burst = [job(f"b{i:03}", PROMPT, 2, START_NS) for i in range(BURST)]
    bench.run(burst, until_ns=START_NS + 1)
    told = [served for served in bench.served.values() if served.endings]
    assert len(told) == BURST - FIT and bench.scheduler.life.slot <= 1 + depth
    for served in told:
        assert served.outcome == Outcome.REFUSED and served.end.reason == Reason.QUEUE_FULL
        assert served.end.retry_after_s is not None and served.end.retry_after_s >= 1.0
        assert served.end.numbers["waiting_tokens"] <= FIT * PROMPT
    bench.run()
    done = [served for served in bench.served.values() if served.outcome == Outcome.COMPLETED]
    assert [served.job.request.id for served in done] == [f"b{i:03}" for i in range(FIT)]
    computed = sum(int(decision.tokens.sum()) for decision in bench.engine.decisions)
    assert computed == FIT * (PROMPT + 1), "something was computed of what was refused"
    bench.check_end()


def test_without_the_limit_they_all_wait() -> None:
    bench = Bench("kaiseki", blocks=8192)
    bench.run([job(f"b{i:03}", PROMPT, 2, START_NS) for i in range(BURST)], until_ns=START_NS + 1)
    assert not any(served.endings for served in bench.served.values())
