"""What the KV pool's eviction finds again on a trace, beside other caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kaiseki.bench.caches import POLICIES, Trace
from kaiseki.models.progress import Progress, quiet
from kaiseki.sim.run import Stream
from kaiseki.work.batches import Batch
from kaiseki.work.shaping import Shape

POOLS = (1_000, 3_000, 10_000, 25_000, 50_000)
"""Sizes in blocks of the trace."""
MARGIN = 0.005
"""How far ours may be behind the better of the other two at a size; at some size it must be ahead."""


def run(stream: Stream, requests: int | None, progress: Progress = quiet) -> dict[str, Any]:
    """Everything that `kaiseki bench memory` finds.

    Args:
        stream: requests whose prefix blocks are known.
        requests: the first so many; None for all.
        progress: told what is being done.

    Raises:
        ValueError: no request has prefix blocks.
    """
    trace, block_tokens = prefixes(stream(Shape(requests=requests)))
    rates: dict[str, dict[str, float]] = {name: {} for name in POLICIES}
    for number, pool in enumerate(POOLS):
        progress(f"eviction, {pool} blocks", number, len(POOLS))
        for name, measure in POLICIES.items():
            rates[name][str(pool)] = measure(trace, pool)
    return {
        "requests": len(trace),
        "pages": sum(map(len, trace)),
        "distinct_pages": len({page for ids in trace for page in ids}),
        "page_tokens": block_tokens,
        "hit_rate": rates,
        "targets": targets(rates),
    }


def prefixes(batches: Iterator[Batch]) -> tuple[Trace, int]:
    """Page ids of each request that has a full block of prompt, and tokens per page.

    Raises:
        ValueError: there is none.
    """
    trace, block_tokens = [], 0
    for batch in batches:
        block_tokens = batch.blocks.tokens
        for i, prompt_tokens in enumerate(batch.prompt_tokens.tolist()):
            ids = batch.blocks.row(i)[: prompt_tokens // block_tokens].tolist()
            if ids:
                trace.append(ids)
    if not trace:
        raise ValueError("it tells no prefix blocks, so there is nothing to find again")
    return trace, block_tokens


def targets(rates: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Ours against the better of LRU and plain ARC: hardly behind at any size, ahead of both at some."""
    ahead = [rates["kaiseki"][pool] - max(rates["lru"][pool], rates["arc"][pool]) for pool in rates["lru"]]
    return [
        {"name": "hit rate against the better of LRU and ARC, at worst", "found": min(ahead),
         "target": -MARGIN, "ok": min(ahead) >= -MARGIN},
        {"name": "hit rate against the better of LRU and ARC, at best", "found": max(ahead),
         "target": 0.0, "ok": max(ahead) > 0.0},
    ]  # fmt: skip
