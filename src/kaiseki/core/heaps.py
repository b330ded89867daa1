"""Addressable priority queues over request rows: leftist heaps that share one set of link arrays.

Any number of queues live in the same arrays, a queue being just the row at its root, so a queue per
(tenant, lane) costs one integer. Push, pop and delete of any row take O(log n), worst case, and never
touch rows outside the path (C. A. Crane, 1972, for leftist trees). Order is (key, seq): smaller first.
"""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.jit import njit

NIL = -1


@njit
def _less(key: F64, seq: I64, a: int, b: int) -> bool:
    return bool(key[a] < key[b] or (key[a] == key[b] and seq[a] < seq[b]))


@njit
def _restore(links: I32, rank: I32, row: int, stop_early: bool) -> None:
    """Walk from `row` to its root, keeping the higher-ranked child on the left.

    With `stop_early` the walk ends where nothing changed: right when one subtree was replaced.
    """
    while row >= 0:
        left, right = links[0, row], links[1, row]
        left_rank = rank[left] if left >= 0 else 0
        right_rank = rank[right] if right >= 0 else 0
        swapped = left_rank < right_rank
        if swapped:
            links[0, row], links[1, row] = right, left
        new_rank = min(left_rank, right_rank) + 1
        if stop_early and not swapped and new_rank == rank[row]:
            return
        rank[row] = new_rank
        row = links[2, row]


@njit
def _merge(links: I32, rank: I32, key: F64, seq: I64, a: int, b: int) -> int:
    """Merge two heaps given by their roots (either may be NIL); returns the new root."""
    if a < 0 or b < 0:
        root = max(a, b)
        if root >= 0:
            links[2, root] = NIL
        return root
    if _less(key, seq, b, a):
        a, b = b, a
    root = a
    links[2, root] = NIL
    at, other = a, b
    while True:
        right = links[1, at]
        if right < 0:
            links[1, at] = other
            links[2, other] = at
            break
        if _less(key, seq, other, right):
            links[1, at] = other
            links[2, other] = at
            at, other = other, right
        else:
            at = right
    _restore(links, rank, at, False)
    return root


@njit
def push_rows(
    links: I32, rank: I32, key: F64, seq: I64, queue: I32, roots: I32, sizes: I64, rows: I32, queues: I32
) -> None:
    """Push every row into its queue; keys and seqs are already in place."""
    for i in range(rows.size):
        row, q = rows[i], queues[i]
        links[0, row] = NIL
        links[1, row] = NIL
        links[2, row] = NIL
        rank[row] = 1
        queue[row] = q
        sizes[q] += 1
        roots[q] = _merge(links, rank, key, seq, roots[q], row)


@njit
def remove_row(
    links: I32, rank: I32, key: F64, seq: I64, queue: I32, roots: I32, sizes: I64, row: int
) -> bool:
    """Take one row out of whatever queue it is in; a row in none is left alone. Whether it was in one."""
    q = queue[row]
    if q < 0:
        return False
    up = links[2, row]
    heir = _merge(links, rank, key, seq, links[0, row], links[1, row])
    if up < 0:
        roots[q] = heir
    else:
        links[0 if links[0, up] == row else 1, up] = heir
        if heir >= 0:
            links[2, heir] = up
        _restore(links, rank, up, True)
    queue[row] = NIL
    sizes[q] -= 1
    return True


@njit
def remove_rows(
    links: I32, rank: I32, key: F64, seq: I64, queue: I32, roots: I32, sizes: I64, rows: I32
) -> int:
    """Take rows out of whatever queues they are in. Returns how many were in one."""
    count = 0
    for i in range(rows.size):
        count += remove_row(links, rank, key, seq, queue, roots, sizes, rows[i])
    return count


@njit
def _sift_down(heads: I32, count: int, key: F64, seq: I64, roots: I32, at: int) -> None:
    """Restore the order of a binary heap of queues, by the row at each queue's root."""
    while True:
        child = 2 * at + 1
        if child >= count:
            return
        if child + 1 < count and _less(key, seq, roots[heads[child + 1]], roots[heads[child]]):
            child += 1
        if not _less(key, seq, roots[heads[child]], roots[heads[at]]):
            return
        heads[at], heads[child] = heads[child], heads[at]
        at = child


@njit
def pop_best(
    links: I32,
    rank: I32,
    key: F64,
    seq: I64,
    queue: I32,
    roots: I32,
    sizes: I64,
    width: int,
    quota: I32,
    skip: Bool,
    heads: I32,
    out: I32,
) -> int:
    """Pop up to `out.size` rows in (key, seq) order across all queues: a tournament of their heads.

    At most `quota[g]` (used up) come from queues g * width to (g + 1) * width - 1 together, none from those
    in `skip`. `heads`: int32[queues], scratch. Returns how many were popped into `out`.
    """
    count = 0
    for q in range(roots.size):
        if roots[q] >= 0 and quota[q // width] > 0 and not skip[q]:
            heads[count] = q
            count += 1
    for at in range(count // 2 - 1, -1, -1):
        _sift_down(heads, count, key, seq, roots, at)
    taken = 0
    while taken < out.size and count > 0:
        q = heads[0]
        if quota[q // width] > 0:
            row = roots[q]
            remove_row(links, rank, key, seq, queue, roots, sizes, row)
            quota[q // width] -= 1
            out[taken] = row
            taken += 1
        if roots[q] < 0 or quota[q // width] <= 0:
            count -= 1
            heads[0] = heads[count]
        _sift_down(heads, count, key, seq, roots, 0)
    return taken


@njit
def pop_due(
    links: I32, rank: I32, key: F64, seq: I64, queue: I32, roots: I32, sizes: I64, due: float, out: I32
) -> int:
    """Pop up to `out.size` rows of queue 0 whose key is below `due`. Returns how many."""
    taken = 0
    while taken < out.size and roots[0] >= 0 and key[roots[0]] < due:
        out[taken] = roots[0]
        remove_row(links, rank, key, seq, queue, roots, sizes, roots[0])
        taken += 1
    return taken


class HeapSet:
    """Queues of rows by key. A row is in at most one queue of a set.

    Args:
        queues: how many queues to begin with; `ensure_queues` adds more.
        capacity: how many rows to begin with; `ensure_rows` adds more.
    """

    def __init__(self, queues: int, capacity: int) -> None:
        self._links: I32 = np.full((3, capacity), NIL, np.int32)  # left, right, parent
        self._rank: I32 = np.zeros(capacity, np.int32)
        self._queue: I32 = np.full(capacity, NIL, np.int32)
        self.key: F64 = np.zeros(capacity)
        self.seq: I64 = np.zeros(capacity, np.int64)
        self.roots: I32 = np.full(queues, NIL, np.int32)
        self.sizes: I64 = np.zeros(queues, np.int64)
        self._count = 0

    def ensure_queues(self, queues: int) -> None:
        """Make room for queue numbers below `queues`."""
        extra = queues - self.roots.size
        if extra > 0:
            self.roots = np.append(self.roots, np.full(extra, NIL, np.int32))
            self.sizes = np.append(self.sizes, np.zeros(extra, np.int64))

    def spread(self, old: int, new: int) -> None:
        """Renumber queues: runs of `old` of them become the beginnings of runs of `new`, >= `old`."""
        runs = self.roots.size // old
        places = (np.arange(runs)[:, None] * new + np.arange(old)).reshape(-1)
        for name, empty in (("roots", NIL), ("sizes", 0)):
            before = getattr(self, name)
            after = np.full(runs * new, empty, before.dtype)
            after[places] = before
            setattr(self, name, after)
        used = self._queue >= 0
        self._queue[used] = places[self._queue[used]]

    def ensure_rows(self, capacity: int) -> None:
        """Make room for row numbers below `capacity`."""
        extra = capacity - self.key.size
        if extra > 0:
            self._links = np.concatenate([self._links, np.full((3, extra), NIL, np.int32)], axis=1)
            self._rank = np.append(self._rank, np.zeros(extra, np.int32))
            self._queue = np.append(self._queue, np.full(extra, NIL, np.int32))
            self.key = np.append(self.key, np.zeros(extra))
            self.seq = np.append(self.seq, np.zeros(extra, np.int64))

    def __contains__(self, row: int) -> bool:
        return row < self._queue.size and bool(self._queue[row] >= 0)

    def __len__(self) -> int:
        return self._count

    def push(self, rows: I32, queues: I32, keys: F64, seqs: I64) -> None:
        """Put rows, which are in no queue of this set, into their queues."""
        self.key[rows] = keys
        self.seq[rows] = seqs
        self.push_back(rows, queues)

    def push_back(self, rows: I32, queues: I32) -> None:
        """Return popped rows under the keys they had."""
        push_rows(*self._arrays(), rows, queues)
        self._count += rows.size

    def remove(self, rows: I32) -> None:
        """Take rows out of their queues; those in none are left alone."""
        self._count -= remove_rows(*self._arrays(), rows)

    def pop(self, limit: int, quota: I32, width: int = 1, skip: Bool | None = None) -> I32:
        """Pop up to `limit` rows in order; at most `quota[g]` (used up) from the g-th `width` queues.

        `skip`: bool[queues], queues to leave alone.
        """
        out, heads = np.empty(limit, np.int32), np.empty(self.roots.size, np.int32)
        skipped = np.zeros(self.roots.size, np.bool_) if skip is None else skip
        taken = pop_best(*self._arrays(), width, quota, skipped, heads, out)
        self._count -= taken
        return out[:taken]

    def pop_due(self, due: float, limit: int) -> I32:
        """Pop up to `limit` rows of queue 0 with keys below `due`."""
        out = np.empty(limit, np.int32)
        taken = pop_due(*self._arrays(), due, out)
        self._count -= taken
        return out[:taken]

    def _arrays(self) -> tuple[I32, I32, F64, I64, I32, I32, I64]:
        return self._links, self._rank, self.key, self.seq, self._queue, self.roots, self.sizes
