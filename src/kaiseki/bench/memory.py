"""The KV pool on traces: what its eviction finds again, beside other caches, and how full it can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kaiseki.bench.caches import POLICIES, Trace
from kaiseki.bench.fragmentation import BLOCKS, Loop, servings
from kaiseki.memory.pool import Placement
from kaiseki.models.progress import Progress, quiet
from kaiseki.sim.run import Stream
from kaiseki.work.batches import Batch
from kaiseki.work.shaping import Shape

POOLS = (1_000, 3_000, 10_000, 25_000, 50_000)
"""Sizes in blocks of the trace."""
PLACEMENTS: tuple[Placement, ...] = ("runs", "pages")
SERVED = 1_500
"""Requests of each trace that the closed loop serves, at most."""
MOST_FRAGMENTED, MOST_ALLOC_US = 0.05, 1.0
MARGIN = 0.005
"""How far ours may be behind the better of the other two at a size; at some size it must be ahead."""


def run(
    streams: Mapping[str, Stream],
    requests: Mapping[str, int | None],
    progress: Progress = quiet,
    blocks: int = BLOCKS,
) -> dict[str, Any]:
    """Everything that `kaiseki bench memory` finds.

    Args:
        streams: by name; hit rates are those of the first that tells prefix blocks.
        requests: of each the first so many; None for all.
        progress: told what is being done.
        blocks: of the pool whose fragmentation is measured.

    Raises:
        ValueError: no request of any has prefix blocks.
    """
    rates, about = hit_rates(streams, requests, progress)
    placed: dict[str, dict[str, Any]] = {}
    for number, (name, stream) in enumerate(streams.items()):
        progress(f"fragmentation, {name}", number, len(streams))
        first = min(SERVED, requests[name] or SERVED)
        placed[name] = {
            how: Loop(servings(stream(Shape(requests=first))), how, blocks).run().figures()
            for how in PLACEMENTS
        }
    return about | {
        "hit_rate": rates,
        "fragmentation": {key: worst(placed, "runs", key) for key in ("internal", "external")},
        "alloc_us": max((one["runs"]["alloc_us"] for one in placed.values()), key=lambda us: us["p50"]),
        "placement": placed,
        "targets": targets(rates) + targets_of_placement(placed),
    }


def hit_rates(
    streams: Mapping[str, Stream], requests: Mapping[str, int | None], progress: Progress
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """By policy and size of the pool, and what trace they are of; see `run`."""
    for name, stream in streams.items():
        trace, block_tokens = prefixes(stream(Shape(requests=requests[name])))
        if trace:
            break
    else:
        raise ValueError(f"{', '.join(streams)}: none tells prefix blocks, so there is nothing to find again")
    rates: dict[str, dict[str, float]] = {policy: {} for policy in POLICIES}
    for number, pool in enumerate(POOLS):
        progress(f"eviction, {pool} blocks", number, len(POOLS))
        for policy, measure in POLICIES.items():
            rates[policy][str(pool)] = measure(trace, pool)
    about = {
        "trace": name,
        "requests": len(trace),
        "pages": sum(map(len, trace)),
        "distinct_pages": len({page for ids in trace for page in ids}),
        "page_tokens": block_tokens,
    }
    return rates, about


def prefixes(batches: Iterator[Batch]) -> tuple[Trace, int]:
    """Page ids of each request that has a full block of prompt, and tokens per page."""
    trace, block_tokens = [], 0
    for batch in batches:
        block_tokens = batch.blocks.tokens
        for i, prompt_tokens in enumerate(batch.prompt_tokens.tolist()):
            ids = batch.blocks.row(i)[: prompt_tokens // block_tokens].tolist()
            if ids:
                trace.append(ids)
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


def worst(placed: dict[str, dict[str, Any]], how: Placement, key: str) -> float | None:
    """The largest of a figure over the traces, None where the pool was never full."""
    found: list[float] = [one[how][key] for one in placed.values()]
    return None if any(value is None for value in found) else max(found)


def targets_of_placement(placed: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Fragmentation of a pool that is nearly full, and the time to take a page."""
    found = [
        (f"{key} fragmentation", worst(placed, "runs", key), MOST_FRAGMENTED)
        for key in ("internal", "external")
    ]
    slowest = max(one["runs"]["alloc_us"]["p50"] for one in placed.values())
    found.append(("us per page, median", slowest, MOST_ALLOC_US))
    return [
        {"name": name, "found": value, "target": most, "ok": value is not None and value <= most}
        for name, value, most in found
    ]
