"""Prompts over 32 K tokens: a lane of their own, admitted by chunks, not stopped again and again (A15)."""

from __future__ import annotations

import numpy as np
import pytest
from tests.harness import MS, START_NS, Bench, S, job

from kaiseki.core.lanes import LANES, LONG_LANE
from kaiseki.core.reasons import Outcome
from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings

# 5 ms a slot, 0.02 ms a prefill token.
CARD = np.array([5e6, 0.1e6, 0.0, 0.02e6, 0.0, 0.0, 0.0])
CHAT = ServiceClass("chat", ttft_ns=1 * S, tbt_ns=100 * MS, weight=4.0)
LONG, LONGS, SHORTS, PAGE = 36_000, 8, 32, 64
POOL = 3 * LONG // PAGE
"""Less than half of what all of them need; a fifth of the requests is four fifths of that."""


@pytest.mark.parametrize("depth", [0, 1])
def test_they_share_a_lane_and_are_stopped_at_most_once(depth: int) -> None:
    """Without a watermark, so that what runs grows into each other's blocks."""
    settings = SchedulerSettings(watermark_ratio=1.0, max_slot_tokens=4096)
    bench = Bench("kaiseki", depth, blocks=POOL, block_tokens=PAGE, weights=CARD, settings=settings)
    longs = [job(f"long{i}", LONG, 400, START_NS + i * 100 * MS) for i in range(LONGS)]
    shorts = [job(f"s{i}", 500, 1_000, START_NS + i * 200 * MS, cls=CHAT) for i in range(SHORTS)]
    lanes: set[int] = set()

    def look(bench: Bench) -> None:
        table, life = bench.scheduler.table, bench.scheduler.life
        lanes.update(int(table.group[r]) % LANES for r, name in life.names.items() if name.startswith("long"))

    bench.each_slot = look
    bench.run([*longs, *shorts])
    bench.check_end()
    assert lanes == {LONG_LANE}
    endings = {}
    for name, served in bench.served.items():
        story = bench.driver.history.story(name)
        assert served.outcome == Outcome.COMPLETED and story is not None and story.ending is not None
        endings[name] = story.ending
    assert max(endings[j.request.id].preemptions for j in longs) <= 1
    assert all(endings[j.request.id].attained for j in shorts), "those behind them had to wait"
    # Chunk by chunk, several slots each, beside those that decode.
    prefill = [int(n) for d in bench.engine.decisions for n in d.tokens if n > 1]
    assert max(prefill) <= 4096 and len(prefill) > LONGS * LONG / 4096
