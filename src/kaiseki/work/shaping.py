"""Changes to a stream of requests that leave its character alone: rate, number, largest total."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from kaiseki.work.batches import I64, Batch, take


@dataclass(frozen=True, slots=True)
class Shape:
    """What to make of a stream.

    Attributes:
        rate_scale: the load arrives this many times as fast. The whole clock is scaled, think and tool
            times included, or the requests of a session would change places with others.
        requests: only the first so many; None takes all.
        max_total_tokens: requests with more prompt and output tokens than this are shrunk to it,
            both in proportion; None leaves them.

    Raises:
        ValueError: a value is out of its range.
    """

    rate_scale: float = 1.0
    requests: int | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate_scale < float("inf"):
            raise ValueError(f"rate_scale must be a positive number, got {self.rate_scale}")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"requests must be at least 1, got {self.requests}")
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise ValueError(f"max_total_tokens must be at least 2, got {self.max_total_tokens}")

    def apply(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The stream so changed."""
        if self.requests is not None:
            batches = take(batches, self.requests)
        for batch in batches:
            if self.rate_scale != 1.0:
                batch = _faster(batch, self.rate_scale)
            if self.max_total_tokens is not None:
                batch = shrink(batch, self.max_total_tokens)
            yield batch


def _faster(batch: Batch, rate_scale: float) -> Batch:
    follow = replace(batch.follow, delay_ns=_scaled(batch.follow.delay_ns, rate_scale))
    return replace(batch, arrival_ns=_scaled(batch.arrival_ns, rate_scale), follow=follow)


def _scaled(times_ns: I64, rate_scale: float) -> I64:
    return np.floor(times_ns / rate_scale).astype(np.int64)


def shrink(batch: Batch, max_total_tokens: int) -> Batch:
    """Requests over a total shrunk to it, prompt and output in proportion, each at least one token."""
    prompt = batch.prompt_tokens.astype(np.int64)
    total = prompt + batch.output_tokens
    large = total > max_total_tokens
    if not large.any():
        return batch
    shorter = np.clip(prompt * max_total_tokens // total, 1, max_total_tokens - 1)
    prompt_tokens = np.where(large, shorter, prompt).astype(np.int32)
    output_tokens = np.where(large, max_total_tokens - shorter, batch.output_tokens).astype(np.int32)
    blocks = batch.blocks.cut(np.where(large, shorter, total).astype(np.int32))
    return replace(batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens, blocks=blocks)
