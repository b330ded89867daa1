"""Addressable priority queues over request rows: leftist heaps that share one array of nodes.

Any number of queues live in the same array, a queue being just the row at its root, so a queue per
(tenant, lane) costs one integer. Push, pop and delete of any row take O(log n), worst case, and never
touch rows outside the path (C. A. Crane, 1972, for leftist trees). Order is (key, seq): smaller first.
"""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.table import Records

NIL = -1


NODE = np.dtype(
    [
        ("left", np.int32),
        ("right", np.int32),
        ("parent", np.int32),
        ("rank", np.int32),
        ("queue", np.int32),  # in which the row is, or NIL
        ("key", np.float64),
        ("seq", np.int64),
    ],
    align=True,
)


@inlined
def _less(nodes: Records, a: int, b: int) -> bool:
    one, other = nodes[a], nodes[b]
    return bool(one["key"] < other["key"] or (one["key"] == other["key"] and one["seq"] < other["seq"]))


@kernel
def _restore(nodes: Records, row: int, stop_early: bool) -> None:
    """Walk from `row` to its root, keeping the higher-ranked child on the left.

    With `stop_early` the walk ends where nothing changed: right when one subtree was replaced.
    """
    while row >= 0:
        node = nodes[row]
        left, right = node["left"], node["right"]
        left_rank = nodes[left]["rank"] if left >= 0 else 0
        right_rank = nodes[right]["rank"] if right >= 0 else 0
        swapped = left_rank < right_rank
        if swapped:
            node["left"] = right
            node["right"] = left
        new_rank = min(left_rank, right_rank) + 1
        if stop_early and not swapped and new_rank == node["rank"]:
            return
        node["rank"] = new_rank
        row = node["parent"]


@kernel
def _merge(nodes: Records, a: int, b: int) -> int:
    """Merge two heaps given by their roots (either may be NIL); returns the new root."""
    if a < 0 or b < 0:
        root = max(a, b)
        if root >= 0:
            nodes[root]["parent"] = NIL
        return root
    if _less(nodes, b, a):
        a, b = b, a
    root = a
    nodes[root]["parent"] = NIL
    at, other = a, b
    while True:
        right = nodes[at]["right"]
        if right < 0:
            nodes[at]["right"] = other
            nodes[other]["parent"] = at
            break
        if _less(nodes, other, right):
            nodes[at]["right"] = other
            nodes[other]["parent"] = at
            at, other = other, right
        else:
            at = right
    _restore(nodes, at, False)
    return root


@kernel
def push_row(nodes: Records, roots: I32, sizes: I64, row: int, queue: int) -> None:
    """Push a row into a queue; its key and seq are already in place."""
    node = nodes[row]
    node["left"] = NIL
    node["right"] = NIL
    node["parent"] = NIL
    node["rank"] = 1
    node["queue"] = queue
    sizes[queue] += 1
    roots[queue] = _merge(nodes, roots[queue], row)


@kernel
def push_rows(nodes: Records, roots: I32, sizes: I64, rows: I32, queues: I32) -> None:
    """Push every row into its queue."""
    for i in range(rows.size):
        push_row(nodes, roots, sizes, rows[i], queues[i])


@kernel
def remove_row(nodes: Records, roots: I32, sizes: I64, row: int) -> bool:
    """Take one row out of whatever queue it is in; a row in none is left alone. Whether it was in one."""
    node = nodes[row]
    queue, up = node["queue"], node["parent"]
    if queue < 0:
        return False
    heir = _merge(nodes, node["left"], node["right"])
    if up < 0:
        roots[queue] = heir
    else:
        if nodes[up]["left"] == row:
            nodes[up]["left"] = heir
        else:
            nodes[up]["right"] = heir
        if heir >= 0:
            nodes[heir]["parent"] = up
        _restore(nodes, up, True)
    node["queue"] = NIL
    sizes[queue] -= 1
    return True


@kernel
def remove_rows(nodes: Records, roots: I32, sizes: I64, rows: I32) -> int:
    """Take rows out of whatever queues they are in. Returns how many were in one."""
    count = 0
    for i in range(rows.size):
        count += remove_row(nodes, roots, sizes, rows[i])
    return count


@kernel
def _sift_down(heads: I32, count: int, nodes: Records, roots: I32, at: int) -> None:
    """Restore the order of a binary heap of queues, by the row at each queue's root."""
    while True:
        child = 2 * at + 1
        if child >= count:
            return
        if child + 1 < count and _less(nodes, roots[heads[child + 1]], roots[heads[child]]):
            child += 1
        if not _less(nodes, roots[heads[child]], roots[heads[at]]):
            return
        heads[at], heads[child] = heads[child], heads[at]
        at = child


@kernel
def pop_best(
    nodes: Records, roots: I32, sizes: I64, width: int, quota: I32, skip: Bool, heads: I32, out: I32
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
        _sift_down(heads, count, nodes, roots, at)
    taken = 0
    while taken < out.size and count > 0:
        q = heads[0]
        if quota[q // width] > 0:
            row = roots[q]
            remove_row(nodes, roots, sizes, row)
            quota[q // width] -= 1
            out[taken] = row
            taken += 1
        if roots[q] < 0 or quota[q // width] <= 0:
            count -= 1
            heads[0] = heads[count]
        _sift_down(heads, count, nodes, roots, 0)
    return taken


@kernel
def pop_due(nodes: Records, roots: I32, sizes: I64, due: float, out: I32) -> int:
    """Pop up to `out.size` rows of queue 0 whose key is below `due`. Returns how many."""
    taken = 0
    while taken < out.size and roots[0] >= 0 and nodes[roots[0]]["key"] < due:
        out[taken] = roots[0]
        remove_row(nodes, roots, sizes, roots[0])
        taken += 1
    return taken


def _blank(count: int) -> Records:
    nodes: Records = np.zeros(count, NODE)
    for name in ("left", "right", "parent", "queue"):
        nodes[name] = NIL
    return nodes


class HeapSet:
    """Queues of rows by key. A row is in at most one queue of a set.

    Attributes:
        nodes: NODE[capacity], by row.
        roots: int32[queues], the first row of each, or NIL.
        sizes: int64[queues].
        count: the sum of these; whoever calls the functions above directly keeps it up to date.

    Args:
        queues: how many queues to begin with; `ensure_queues` adds more.
        capacity: how many rows to begin with; `ensure_rows` adds more.
    """

    def __init__(self, queues: int, capacity: int) -> None:
        self.nodes = _blank(capacity)
        self.roots: I32 = np.full(queues, NIL, np.int32)
        self.sizes: I64 = np.zeros(queues, np.int64)
        self.count = 0
        self._skip_none: Bool = np.zeros(queues, np.bool_)

    def ensure_queues(self, queues: int) -> None:
        """Make room for queue numbers below `queues`."""
        extra = queues - self.roots.size
        if extra > 0:
            self.roots = np.append(self.roots, np.full(extra, NIL, np.int32))
            self.sizes = np.append(self.sizes, np.zeros(extra, np.int64))
            self._skip_none = np.zeros(queues, np.bool_)

    def spread(self, old: int, new: int) -> None:
        """Renumber queues: runs of `old` of them become the beginnings of runs of `new`, >= `old`."""
        runs = self.roots.size // old
        places = (np.arange(runs)[:, None] * new + np.arange(old)).reshape(-1)
        for name, empty in (("roots", NIL), ("sizes", 0)):
            before = getattr(self, name)
            after = np.full(runs * new, empty, before.dtype)
            after[places] = before
            setattr(self, name, after)
        self._skip_none = np.zeros(runs * new, np.bool_)
        queue = self.nodes["queue"]
        used = queue >= 0
        queue[used] = places[queue[used]]

    def ensure_rows(self, capacity: int) -> None:
        """Make room for row numbers below `capacity`."""
        extra = capacity - self.nodes.size
        if extra > 0:
            self.nodes = np.concatenate([self.nodes, _blank(extra)])

    @property
    def key(self) -> F64:
        """float64[capacity], by row: the key under which it is here, or was last."""
        key: F64 = self.nodes["key"]
        return key

    def __contains__(self, row: int) -> bool:
        return row < self.nodes.size and bool(self.nodes["queue"][row] >= 0)

    def __len__(self) -> int:
        return self.count

    def push(self, rows: I32, queues: I32, keys: F64, seqs: I64) -> None:
        """Put rows, which are in no queue of this set, into their queues."""
        self.nodes["key"][rows] = keys
        self.nodes["seq"][rows] = seqs
        self.push_back(rows, queues)

    def push_back(self, rows: I32, queues: I32) -> None:
        """Return popped rows under the keys they had."""
        push_rows(self.nodes, self.roots, self.sizes, rows, queues)
        self.count += rows.size

    def remove(self, rows: I32) -> None:
        """Take rows out of their queues; those in none are left alone."""
        self.count -= remove_rows(self.nodes, self.roots, self.sizes, rows)

    def pop(self, limit: int, quota: I32, width: int = 1, skip: Bool | None = None) -> I32:
        """Pop up to `limit` rows in order; at most `quota[g]` (used up) from the g-th `width` queues.

        `skip`: bool[queues], queues to leave alone.
        """
        out, heads = np.empty(limit, np.int32), np.empty(self.roots.size, np.int32)
        skipped = self._skip_none if skip is None else skip
        taken = pop_best(self.nodes, self.roots, self.sizes, width, quota, skipped, heads, out)
        self.count -= taken
        return out[:taken]

    def pop_due(self, due: float, limit: int) -> I32:
        """Pop up to `limit` rows of queue 0 with keys below `due`."""
        first = self.roots.item(0)
        if first < 0 or self.nodes["key"].item(first) >= due:
            return np.empty(0, np.int32)
        out = np.empty(limit, np.int32)
        taken = pop_due(self.nodes, self.roots, self.sizes, due, out)
        self.count -= taken
        return out[:taken]
