"""What is kept of requests: a bounded number of them, and little of each."""

from __future__ import annotations

import pytest
from tests.harness import Bench, hashes, job

from kaiseki.core.requests import Request
from kaiseki.observe.history import SLOT, History, Ring, Story


def test_digests_of_prompts_are_not_kept() -> None:
    """A long prompt has thousands; over all stories that would be gigabytes."""
    bench = Bench("fcfs")
    ids = list(range(160))
    bench.submit(job("served", 160, 4, block_hashes=hashes(ids, 16)), ids)
    never = hashes([1] * 160, 16)
    bench.submit(job("refused", 1 << 20, 4, block_hashes=never), ids)
    bench.run()
    stories = [bench.driver.history.story(name) for name in ("served", "refused")]
    assert [story.request.block_hashes for story in stories] == [(), ()]


@pytest.mark.parametrize("names", [lambda i: f"r{i}", lambda i: f"r{i % 3}"], ids=["new ids", "used again"])
def test_old_requests_are_forgotten(names: object) -> None:
    history = History(requests=4)
    for i in range(20):
        history.opened(Story(Request(names(i), 1, 1), seq=i))  # type: ignore[operator]
    kept = [entry["request"] for entry in history.recent(99, None)]
    assert kept == [names(i) for i in (19, 18, 17, 16)][: len(set(kept))]  # type: ignore[operator]
    assert len(history._stories) == len(history._by_seq) <= 4
    assert all(history.name_of(i) == names(i) for i in (19, 18, 17))  # type: ignore[operator]


def test_the_newest_of_a_ring_are_its_last_records() -> None:
    ring = Ring(SLOT, 5)
    for written in range(13):
        for most in range(8):
            assert ring.newest(most).tolist() == ring.read()[max(0, len(ring.read()) - most) :].tolist()
        ring.append(written, 10 * written)
