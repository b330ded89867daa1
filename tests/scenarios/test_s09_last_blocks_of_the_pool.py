"""s09: blocks of 16, model length 1,024, a pool of 69 blocks; prompt 1,000, max_tokens 24.

Guards that one request can always finish: the oldest gets the blocks it needs for its last tokens, whatever
else runs and whatever the watermark. The situation also has three draft tokens; the scheduler knows no
drafts yet, so what is tested is the block arithmetic without them.
"""

from __future__ import annotations

import pytest
from tests.harness import MS, START_NS, Bench, job

from kaiseki.core.protocols import Capabilities
from kaiseki.core.reasons import Finish, Outcome
from kaiseki.core.settings import SchedulerSettings

PAGE, LENGTH, PROMPT, OUTPUT = 16, 1_024, 1_000, 24
NEEDED = LENGTH // PAGE


@pytest.mark.parametrize(("depth", "placeholders"), [(0, True), (1, True), (3, False)])
@pytest.mark.parametrize("blocks", [NEEDED - 1, NEEDED, 69])
@pytest.mark.parametrize("policy", ["fcfs", "kaiseki", "static"])
def test_it_finishes_or_is_refused(policy: str, blocks: int, depth: int, placeholders: bool) -> None:
    bench = Bench(
        policy,
        depth,
        placeholders,
        blocks,
        PAGE,
        SchedulerSettings(watermark_ratio=0.8),
        capabilities=Capabilities(max_context_tokens=LENGTH),
        audit=True,
    )
    # Others that start beside it and grow into the blocks that it needs for its end.
    others = [job(f"r{i}", 20, 60, START_NS + i * 20 * MS) for i in range(8)]
    bench.run([job("long", PROMPT, OUTPUT), *others])  # which fails when nothing moves any more
    bench.check_end()
    long = bench.served["long"]
    if blocks < NEEDED:
        assert long.outcome == Outcome.REFUSED
    else:
        assert long.outcome == Outcome.COMPLETED
        assert len(long.tokens) == OUTPUT and long.end.finish == Finish.LENGTH
    assert all(bench.served[j.request.id].outcome == Outcome.COMPLETED for j in others)


def test_one_token_over_the_model_length_is_refused() -> None:
    bench = Bench(blocks=69, block_tokens=PAGE, capabilities=Capabilities(max_context_tokens=LENGTH))
    bench.submit(job("over", PROMPT, OUTPUT + 1))
    bench.run()
    assert bench.served["over"].outcome == Outcome.REFUSED
