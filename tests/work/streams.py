"""What the tests of workloads do with streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from kaiseki.work.batches import Batch


def column(batches: Iterable[Batch], name: str) -> np.ndarray:
    return np.concatenate([getattr(batch, name) for batch in batches])


def same(one: Any, other: Any) -> bool:
    """Whether two batches, or parts of them, hold the same."""
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def prompt_ids(batch: Batch, row: int) -> list[int]:
    """Ids of the blocks of a prompt, without those of the output."""
    blocks = -(-int(batch.prompt_tokens[row]) // batch.blocks.tokens)
    return batch.blocks.row(row)[:blocks].tolist()


def reuse(batches: Iterable[Batch]) -> tuple[float, float]:
    """Of all prompt blocks, the share seen before as part of a prefix; share of requests with over one."""
    seen: set[int] = set()
    found = blocks = branching = requests = 0
    for batch in batches:
        for row in range(len(batch)):
            ids = prompt_ids(batch, row)
            hit = next((i for i, one in enumerate(ids) if one not in seen), len(ids))
            found, blocks, branching, requests = (
                found + hit,
                blocks + len(ids),
                branching + (hit > 1),
                requests + 1,
            )
            seen.update(batch.blocks.row(row).tolist())
    return found / blocks, branching / requests


def dispersion(arrival_ns: np.ndarray, window_s: float) -> float:
    """Variance over mean of the number of arrivals per window; 1 for Poisson arrivals."""
    counts = np.bincount((arrival_ns / (window_s * 1e9)).astype(int))[:-1]
    return float(counts.var() / counts.mean())
