"""Engines with pipeline stages: the slots in flight share the decodes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.harness import Bench, job

from kaiseki.core.reasons import Outcome


@pytest.mark.parametrize(("depth", "most"), [(0, 12), (1, 6), (3, 3)])
@pytest.mark.parametrize("policy", ["fcfs", "kaiseki"])
def test_each_slot_takes_its_part_of_the_decodes(policy: str, depth: int, most: int) -> None:
    bench = Bench(policy, depth, placeholders=False, audit=True)
    bench.run([job(f"r{i}", 20, 60) for i in range(12)])
    bench.check_end()
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    decodes = [d.rows.size for d in bench.engine.decisions if (d.tokens == 1).all()][: 40 * (depth + 1)]
    assert np.median(decodes) == max(decodes[10:]) == most


def test_everybody_decodes_equally_often() -> None:
    bench = Bench("kaiseki", 3, placeholders=False)
    bench.run([job(f"r{i}", 20, 60) for i in range(13)])
    last = [s.times_ns[-1] for s in bench.served.values()]
    slot = max(r.ended_ns - r.started_ns for r in bench.engine.results)
    assert max(last) - min(last) <= 8 * slot
