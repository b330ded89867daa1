"""KV of stopped requests goes to host memory and back, on an engine that knows what each block holds."""

from __future__ import annotations

import numpy as np
import pytest
from tests.harness import START_NS, Bench, hashes, job, prompt_ids

from kaiseki.core.decision import How, Way
from kaiseki.core.protocols import Capabilities
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.switching import LinearSwitch

PAGE = 8
CHEAP, DEAR = 1_000, 10**12


def run(block_ns: int, depth: int = 0, host_blocks: int = 64, policy: str = "kaiseki") -> Bench:
    """Eight requests whose outputs outgrow the pool together."""
    bench = Bench(
        policy,
        depth,
        blocks=48,
        block_tokens=PAGE,
        host_blocks=host_blocks,
        settings=SchedulerSettings(watermark_ratio=1.0),
        capabilities=Capabilities(swap_block_ns=block_ns),
        audit=True,
    )
    jobs = []
    for i in range(8):
        prompt = bench.prompts[f"r{i}"] = prompt_ids(1, 16, i, 30 + i)
        jobs.append(job(f"r{i}", len(prompt), 60, START_NS, block_hashes=hashes(prompt, PAGE)))
    bench.run(jobs)
    bench.check_end()
    return bench


def ways(bench: Bench) -> list[Way]:
    return [Way(way) for d in bench.engine.decisions for way in d.swaps[:, 0].tolist()]


def recomputed(bench: Bench) -> int:
    stories = [bench.driver.history.story(name) for name in bench.served]
    return sum(story.ending.recomputed for story in stories if story is not None and story.ending is not None)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["kaiseki", "fcfs"])
def test_what_is_cheap_to_move_is_moved_and_nothing_is_computed_again(depth: int, policy: str) -> None:
    bench = run(CHEAP, depth, policy=policy)
    how = np.concatenate([d.how for d in bench.engine.decisions])
    assert how.size and (how == How.SWAP).all()
    assert Way.OUT in ways(bench) and Way.IN in ways(bench)
    assert recomputed(bench) == 0


def test_what_is_dear_to_move_is_computed_again() -> None:
    bench = run(DEAR)
    assert not ways(bench)
    assert recomputed(bench) > 0


def test_without_room_in_host_memory_the_rest_is_computed_again() -> None:
    bench = run(CHEAP, host_blocks=8)
    assert Way.OUT in ways(bench)
    assert recomputed(bench) > 0


def test_the_time_per_block_is_learned_from_what_moves_took() -> None:
    switching = LinearSwitch(1_000.0)
    for _ in range(400):
        switching.observe(10, 50_000)
    assert switching.block_ns == pytest.approx(5_000, rel=0.01)
    blocks, recompute_ns = np.array([1, 10]), np.array([9_000.0, 200_000.0])
    assert switching.prefers_swap(blocks, recompute_ns).tolist() == [False, True]
