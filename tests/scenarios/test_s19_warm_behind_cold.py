"""s19: a cold prompt of 100 K tokens at the head; behind it a request that needs 500 tokens more than is
cached.

Both don't fit at a time: computing the cold prompt evicts the other's prefix. Guards two rules: where not all
that wait fit, those that are mostly cached come first; and the prefix of who waits next is evicted last.
"""

from __future__ import annotations

import pytest
from tests.harness import START_NS, Bench, S, hashes, job, prompt_ids

from kaiseki.core.reasons import Outcome

PAGE, POOL = 16, 8_000
PREFIX, MORE, COLD = 40_000, 500, 100_000
COMES = START_NS + 30 * S


def run(policy: str, depth: int = 0, others: int = 0) -> Bench:
    """First one who leaves the prefix behind, and `others` who leave theirs; then cold and warm at once."""
    bench = Bench(policy, depth, blocks=POOL, block_tokens=PAGE)
    jobs = []
    lengths = [("first", PREFIX, START_NS), *((f"other{i}", 8_000, START_NS + 5 * S) for i in range(others))]
    for name, length, at_ns in [*lengths, ("cold", COLD, COMES), ("warm", PREFIX + MORE, COMES)]:
        group = 1 if name in ("first", "warm") else 2 + len(jobs)
        prompt = bench.prompts[name] = prompt_ids(group, PREFIX, len(jobs), length)
        jobs.append(job(name, length, 10, at_ns, block_hashes=hashes(prompt, PAGE)))
    bench.run(jobs)
    bench.check_end()
    assert all(served.outcome == Outcome.COMPLETED for served in bench.served.values())
    return bench


@pytest.mark.parametrize("depth", [0, 1])
def test_the_warm_one_runs_before_its_prefix_is_evicted(depth: int) -> None:
    assert run("kaiseki", depth).served["warm"].cached_tokens == PREFIX


def test_a_bare_queue_evicts_the_prefix_of_who_waits_last() -> None:
    """By arrival the cold one is first; what is pinned goes only when all else that is cached has gone."""
    bench = run("fcfs", others=4)
    found = bench.served["warm"].cached_tokens
    room = POOL - COLD // PAGE - 1
    assert bench.served["cold"].times_ns[0] < bench.served["warm"].times_ns[0]
    assert found == room * PAGE < PREFIX
