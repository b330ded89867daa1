"""The pool's eviction beside other caches: ARC that knows of no tree, and what hindsight would keep.

All take a trace as lists of page ids, one per request; equal ids mean equal prefixes up to there. A request
finds its leading pages that are cached, and then has all its pages in the cache. What is returned is the
share of pages that were found.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from kaiseki.memory.pool import BlockPool, Eviction

Trace = Sequence[Sequence[int]]
Queue = dict[int, None]
"""Pages, the longest unused first."""


def _found(ids: Sequence[int], cached: Callable[[int], bool]) -> int:
    """How many leading pages are cached."""
    return next((at for at, page in enumerate(ids) if not cached(page)), len(ids))


def pool(trace: Trace, capacity: int, eviction: Eviction) -> float:
    """Our `BlockPool`, with a block for each page of the trace; requests come one after the other."""
    made = BlockPool(capacity, 1, max_rows_hint=1, eviction=eviction)
    row, start, now = np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, -1, np.int64)
    for ids in trace:
        end = np.array([len(ids)], np.int32)
        made.register(0, [hashlib.sha256(page.to_bytes(8, "little")).digest() for page in ids])
        start[:] = made.attach(row, end)
        made.reserve(row, start, end)
        made.commit(row, end)
        made.release(row, now)
    stats = made.stats()
    return stats.hit_tokens / stats.queried_tokens


class PlainArc:
    """ARC as published (Megiddo and Modha, FAST 2003, figure 4), page by page, blind to the tree.

    It may give up a page whose continuation it keeps, which nobody can use then. Of each request the last
    page is touched first, so that beginnings stay longest; pages of the request at hand are not given up.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0
        self.once: Queue = {}
        self.again: Queue = {}
        self.left_once: Queue = {}
        self.left_again: Queue = {}

    def cached(self, page: int) -> bool:
        """Whether the page is in one of the two queues."""
        return page in self.once or page in self.again

    def touch(self, page: int, at_hand: set[int]) -> None:
        """Use a page; it is in the cache afterwards."""
        if self.cached(page):
            self.once.pop(page, None)
            self.again.pop(page, None)
            self.again[page] = None
        elif page in self.left_once:
            self.target += max(1.0, len(self.left_again) / len(self.left_once))
            self.target = min(self.target, self.capacity)
            self._come_back(page, self.left_once, at_hand)
        elif page in self.left_again:
            self.target -= max(1.0, len(self.left_once) / len(self.left_again))
            self.target = max(self.target, 0.0)
            self._come_back(page, self.left_again, at_hand)
        else:
            self._make_room(at_hand)
            self.once[page] = None

    def _come_back(self, page: int, ghosts: Queue, at_hand: set[int]) -> None:
        if len(self.once) + len(self.again) >= self.capacity:
            self._replace(at_hand, ghosts is self.left_again)
        del ghosts[page]
        self.again[page] = None

    def _make_room(self, at_hand: set[int]) -> None:
        recent = len(self.once) + len(self.left_once)
        held = len(self.once) + len(self.again)
        if recent >= self.capacity and self.left_once:
            del self.left_once[next(iter(self.left_once))]
        elif held + len(self.left_once) + len(self.left_again) >= 2 * self.capacity and self.left_again:
            del self.left_again[next(iter(self.left_again))]
        if held >= self.capacity:
            self._replace(at_hand, False)

    def _replace(self, at_hand: set[int], came_back: bool) -> None:
        over = len(self.once) > self.target or (came_back and len(self.once) == int(self.target))
        queues = [(self.once, self.left_once), (self.again, self.left_again)]
        if not (self.once and over):
            queues.reverse()
        for queue, ghosts in queues:
            victim = next((page for page in queue if page not in at_hand), None)
            if victim is not None:
                del queue[victim]
                ghosts[victim] = None
                return


def plain_arc(trace: Trace, capacity: int) -> float:
    """See `PlainArc`."""
    cache, found = PlainArc(capacity), 0
    for ids in trace:
        found += _found(ids, cache.cached)
        at_hand = set(ids)
        for page in reversed(ids):
            cache.touch(page, at_hand)
    return found / sum(map(len, trace))


def belady(trace: Trace, capacity: int) -> float:
    """What is found when the page used again last is given up (Belady 1966): the most that is possible.

    Who uses a page uses those before it, so a leaf is always among those that are used again last.
    """
    uses: dict[int, list[int]] = defaultdict(list)
    for at in range(len(trace) - 1, -1, -1):
        for page in trace[at]:
            uses[page].append(at)
    next_use: dict[int, int] = {}  # of cached pages
    latest: list[tuple[int, int, int]] = []  # (-next use, -place in its prefix, page), with stale entries
    found = 0
    for ids in trace:
        found += _found(ids, next_use.__contains__)
        at_hand = set(ids)
        short = len(next_use) + sum(page not in next_use for page in at_hand) - capacity
        while short > 0:
            use, _, page = heapq.heappop(latest)
            if page not in at_hand and next_use.get(page) == -use:
                del next_use[page]
                short -= 1
        for place, page in enumerate(ids):
            uses[page].pop()
            next_use[page] = uses[page][-1] if uses[page] else len(trace)
            heapq.heappush(latest, (-next_use[page], -place, page))
    return found / sum(map(len, trace))


POLICIES: dict[str, Callable[[Trace, int], float]] = {
    "kaiseki": lambda trace, capacity: pool(trace, capacity, "arc"),
    "lru": lambda trace, capacity: pool(trace, capacity, "lru"),
    "arc": plain_arc,
    "belady": belady,
}
"""By the name under which their hit rate is reported."""
