"""How well the KV pool is used when it is nearly full: wasted room, scattered pages, and what a page costs.

Requests of a trace are served in a closed loop, without a model: as many at a time as fit, each growing by a
page per slot until its output is there. Where the next pages don't fit, the youngest is stopped and comes
again later.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kaiseki.core.decision import I32
from kaiseki.memory.buddy import BUDDIES
from kaiseki.memory.layout import SIZES
from kaiseki.memory.pool import BlockPool, Placement
from kaiseki.observe.percentiles import percentiles
from kaiseki.work.batches import Batch

PAGE = 16
BLOCKS = 32_768
FULL = 0.9
"""Figures count while at least this share of the pool is in use."""


@dataclass(frozen=True, slots=True)
class Serving:
    """One request: lengths in tokens, and digests of the full pages of its prompt."""

    prompt: int
    output: int
    digests: Sequence[bytes]


@dataclass(slots=True)
class Seen:
    """What was measured, once per slot or call.

    Attributes:
        internal: room in pages in use that holds no token, as a share of their room.
        external: unowned pages in shorter runs than a reservation could use whole, share of the pool.
        used: pages in use, share of the pool.
        us_per_page: thread time of a reservation over the pages it took.
        span_pages: pages that stand side by side in a row's table, mean of the rows that run.
    """

    internal: list[float] = field(default_factory=list)
    external: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    us_per_page: list[float] = field(default_factory=list)
    span_pages: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Means, and percentiles of `alloc_us`; null where the pool was never full."""
        means = {
            name: float(np.mean(values)) if values else None
            for name, values in (
                ("internal", self.internal), ("external", self.external),
                ("pool_use", self.used), ("span_pages", self.span_pages),
            )
        }  # fmt: skip
        return means | {"alloc_us": percentiles(self.us_per_page) if self.us_per_page else None}


def servings(batches: Iterator[Batch]) -> Iterator[Serving]:
    """The requests of a stream; a page's digest stands for its prefix block and its place therein."""
    for batch in batches:
        pages = batch.blocks.tokens // PAGE
        for i, (prompt, output) in enumerate(
            zip(batch.prompt_tokens.tolist(), batch.output_tokens.tolist(), strict=True)
        ):
            ids = [f"{block} {page}" for block in batch.blocks.row(i).tolist() for page in range(pages)]
            digests = [hashlib.sha256(name.encode()).digest() for name in ids[: prompt // PAGE]]
            yield Serving(prompt, output, digests)


class Loop:
    """The closed loop; see the module."""

    def __init__(self, waiting: Iterator[Serving], placement: Placement, blocks: int = BLOCKS) -> None:
        self.pool = BlockPool(blocks, PAGE, placement=placement)
        self.waiting = waiting
        self.stopped: deque[Serving] = deque()
        self.running: dict[int, Serving] = {}  # by row, the oldest first
        self.length: I32 = np.zeros(1, np.int32)  # by row, tokens
        self.seen = Seen()

    def run(self) -> Seen:
        """Until there is nobody left to start."""
        while self._admit():
            self._grow()
            self._measure()
            for row, one in list(self.running.items()):
                if self.length[row] >= one.prompt + one.output:
                    self._stop(row)
        return self.seen

    def _admit(self) -> bool:
        """Start requests while they fit, with a page to grow for everybody. False when none are left."""
        while True:
            one = self.stopped.popleft() if self.stopped else next(self.waiting, None)
            if one is None:
                return False
            if -(-one.prompt // PAGE) + len(self.running) > self.pool.free_blocks():
                self.stopped.appendleft(one)
                return bool(self.running)
            row = next(row for row in range(len(self.running) + 1) if row not in self.running)
            self.length = (
                np.append(self.length, 0).astype(np.int32) if row >= self.length.size else self.length
            )
            self.running[row] = one
            self.pool.register(row, one.digests)
            rows = np.array([row], np.int32)
            start = self.pool.attach(rows, np.array([one.prompt - 1], np.int32))
            self._reserve(rows, start, np.array([one.prompt], np.int32))

    def _grow(self) -> None:
        """Give everybody the next page, after stopping the youngest as long as that does not fit."""
        while True:
            rows = np.array(list(self.running), np.int32)
            if not rows.size:
                return
            starts = self.length[rows]
            if self.pool.growth_need(rows, starts, starts + PAGE).sum() <= self.pool.free_blocks():
                break
            youngest = int(rows[-1])
            self.stopped.appendleft(self.running[youngest])
            self._stop(youngest)
        self._reserve(rows, starts, starts + PAGE)

    def _reserve(self, rows: I32, starts: I32, ends: I32) -> None:
        pool, before = self.pool, self.pool.stats().allocations
        wanted = int((-(-ends // PAGE) - -(-starts // PAGE)).max())
        unowned = pool.unowned_runs()
        began = time.thread_time_ns()
        pool.reserve(rows, starts, ends)
        took = time.thread_time_ns() - began
        pool.commit(rows, ends)
        self.length[rows] = ends
        taken = pool.stats().allocations - before
        if taken:
            self.seen.us_per_page.append(took / 1e3 / taken)
        if pool.live_blocks() >= FULL * pool.total_blocks:
            short = sum(
                runs * BUDDIES**size for size, runs in enumerate(unowned) if BUDDIES**size < usable(wanted)
            )
            self.seen.external.append(short / pool.total_blocks)

    def _measure(self) -> None:
        pool = self.pool
        if pool.live_blocks() < FULL * pool.total_blocks or not self.running:
            return
        rows = np.array(list(self.running), np.int32)
        lengths = self.length[rows]
        unused = int((-(-lengths // PAGE) * PAGE - lengths).sum())
        self.seen.internal.append(unused / (pool.live_blocks() * PAGE))
        self.seen.used.append(pool.live_blocks() / pool.total_blocks)
        pages = -(-lengths // PAGE)
        tables = pool.tables(rows, lengths)
        inside = np.arange(1, tables.shape[1]) < pages[:, None]
        breaks = int(((np.diff(tables, axis=1) != 1) & inside).sum()) + rows.size
        self.seen.span_pages.append(float(pages.sum()) / breaks)

    def _stop(self, row: int) -> None:
        self.pool.release(np.array([row], np.int32), np.full(1, -1, np.int64))
        del self.running[row]


def usable(pages: int) -> int:
    """Pages of the longest run that a reservation of so many uses whole."""
    size = 1
    while size < BUDDIES ** (SIZES - 1) and BUDDIES * size <= pages:
        size *= BUDDIES
    return size
