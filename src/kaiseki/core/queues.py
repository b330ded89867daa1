"""Everything that waits: by policy key per tenant, and by latest start for giving up in time."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.heaps import HeapSet, push_row, remove_row
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.lanes import LANES, lane_of, per_tenant
from kaiseki.core.table import Record, Records, RequestTable

_DEMOTED = 1e20
"""Added to the arrival (ns) to make the key of demoted requests: they come after all others of their tenant.

Small enough that float64 still tells arrivals apart to about 20 microseconds.
"""


@inlined
def queue_of(row: Record, kinds: int) -> int:
    """The queue of a row: those of a tenant in a run, first of the base model, then of each adapter."""
    tenant, lane = row["group"] // LANES, row["group"] % LANES
    return int((tenant * kinds + row["adapter"] + 1) * LANES + lane)


@kernel
def last_tenant(records: Records, rows: I32) -> int:
    """The largest tenant number of rows, -1 without any."""
    last = -1
    for i in range(rows.size):
        last = max(last, records[rows[i]]["tenant"])
    return last


@kernel
def queue_rows(
    records: Records, rows: I32, keys: F64, latest_start_ns: F64, uncached: I32, origin_ns: int, kinds: int,
    by_key: Records, key_roots: I32, key_sizes: I64, by_start: Records, start_roots: I32, start_sizes: I64,
) -> tuple[int, int]:  # fmt: skip
    """Find the lanes of rows, and put them into the queues of both heaps (see `HeapSet`).

    Returns how many have a latest start, and the sum of all prompts.
    """
    watched, tokens = 0, 0
    for i in range(rows.size):
        r = rows[i]
        row, node = records[r], by_key[r]
        late = row["demoted"]
        row["group"] = row["tenant"] * LANES + lane_of(uncached[i], late)
        node["key"] = _DEMOTED + float(row["arrival_ns"] - origin_ns) if late else keys[i]
        node["seq"] = row["seq"]
        tokens += row["prompt"]
        push_row(by_key, key_roots, key_sizes, r, queue_of(row, kinds))
        if not late and np.isfinite(latest_start_ns[i]):
            by_start[r]["key"] = latest_start_ns[i] - origin_ns
            by_start[r]["seq"] = row["seq"]
            push_row(by_start, start_roots, start_sizes, r, 0)
            watched += 1
    return watched, tokens


@kernel
def take_rows(
    records: Records, rows: I32,
    by_key: Records, key_roots: I32, key_sizes: I64, by_start: Records, start_roots: I32, start_sizes: I64,
) -> tuple[int, int, int]:  # fmt: skip
    """Take rows out of both heaps. Returns how many were in the one and the other, and the sum of prompts."""
    queued, watched, tokens = 0, 0, 0
    for i in range(rows.size):
        queued += remove_row(by_key, key_roots, key_sizes, rows[i])
        watched += remove_row(by_start, start_roots, start_sizes, rows[i])
        tokens += records[rows[i]]["prompt"]
    return queued, watched, tokens


@kernel
def find_queues(records: Records, rows: I32, kinds: int, out: I32) -> None:
    """The queue of each row."""
    for i in range(rows.size):
        out[i] = queue_of(records[rows[i]], kinds)


class Waiting:
    """Waiting rows of one replica.

    Two heaps over the same rows: one queue per tenant, adapter and lane ordered by policy key, and one
    ordered by the time at which a request must have started to meet its SLO (ns relative to `origin_ns`, so
    that float64 keeps nanosecond order). New arrivals are counted at once and come into the heaps together,
    before anybody looks.
    """

    def __init__(self, table: RequestTable, origin_ns: int = 0) -> None:
        self._table = table
        self._by_key = HeapSet(LANES, table.capacity)
        self._by_start = HeapSet(1, table.capacity)
        self.origin_ns = origin_ns
        self.tokens = 0
        self._arrived: list[int] = []
        self._arrived_tokens = 0
        self._kinds = 1  # of models that queues tell apart: the base model, and adapters
        self._out: Bool = np.zeros(1, np.bool_)  # those that nobody can have now

    def __len__(self) -> int:
        return len(self._by_key) + len(self._arrived)

    def __contains__(self, row: int) -> bool:
        return row in self._by_key or row in self._arrived

    def arrive(self, row: int, prompt_tokens: int) -> None:
        """Count a row that `take_arrivals` will give to whoever adds it."""
        self._arrived.append(row)
        self._arrived_tokens += prompt_tokens
        self.tokens += prompt_tokens

    @property
    def arrivals(self) -> int:
        """How many arrived and are in no heap yet."""
        return len(self._arrived)

    def take_arrivals(self) -> I32:
        """Rows that arrived and are in no heap yet; they count no more until they are added."""
        rows: I32 = np.array(self._arrived, np.int32)
        self._arrived.clear()
        self.tokens -= self._arrived_tokens
        self._arrived_tokens = 0
        return rows

    def keys(self, rows: I32) -> F64:
        """float64[n]: policy keys under which rows wait, or waited last."""
        return self._by_key.key[rows]

    def all_keys(self) -> F64:
        """float64[capacity], by row: policy keys under which rows wait, or waited last."""
        return self._by_key.key

    def count(self, tenant: int) -> int:
        """How many requests of a tenant wait."""
        width = self._kinds * LANES
        return int(self._by_key.sizes[tenant * width : (tenant + 1) * width].sum())

    def counts(self) -> I64:
        """int64[tenants seen so far]: how many wait."""
        return per_tenant(self.by_group())

    def by_group(self) -> I64:
        """int64[tenants * LANES]: how many wait in each lane of each tenant seen so far."""
        sizes = self._by_key.sizes
        return sizes if self._kinds == 1 else self._cube().sum(axis=1).reshape(-1)

    def reachable(self) -> I64:
        """As `by_group`, without those whose adapter can't be had."""
        if self._kinds == 1:
            return self._by_key.sizes
        within: I64 = self._cube()[:, ~self._out].sum(axis=1).reshape(-1)
        return within

    def by_adapter(self) -> I64:
        """int64[room for adapters]: how many wait for each."""
        waiting: I64 = self._cube().sum(axis=(0, 2))[1:]
        return waiting

    def _cube(self) -> I64:
        """int64[tenants, kinds, LANES]: how many wait."""
        return self._by_key.sizes.reshape(-1, self._kinds, LANES)

    def tell_apart(self, adapters: int) -> None:
        """Have queues for so many adapters."""
        if adapters >= self._kinds:
            kinds = 1 + max(4, 2 * adapters)
            self._by_key.spread(self._kinds * LANES, kinds * LANES)
            self._out = np.append(self._out, np.zeros(kinds - self._kinds, np.bool_))
            self._kinds = kinds

    def leave_out(self, adapters: Bool) -> None:
        """From now on `peek` passes over requests for these adapters (bool[n]), which can't be had."""
        self._out[1 : 1 + adapters.size] = adapters

    def add(self, rows: I32, keys: F64, latest_start_ns: F64, uncached: I32) -> None:
        """Queue rows under policy keys, in the lanes of their sizes; a latest start may be infinite.

        `uncached`: int32[n], tokens to compute. The table's `group` says afterwards where each row is.
        """
        t, by_key, by_start = self._table, self._by_key, self._by_start
        by_key.ensure_rows(t.capacity)
        by_start.ensure_rows(t.capacity)
        by_key.ensure_queues((last_tenant(t.records, rows) + 1) * self._kinds * LANES)
        watched, tokens = queue_rows(
            t.records, rows, keys, latest_start_ns, uncached, self.origin_ns, self._kinds,
            by_key.nodes, by_key.roots, by_key.sizes, by_start.nodes, by_start.roots, by_start.sizes,
        )  # fmt: skip
        by_key.count += rows.size
        by_start.count += watched
        self.tokens += tokens

    def take(self, rows: I32) -> None:
        """Remove rows that were added: they start, end or change their keys."""
        if rows.size == 0:
            return
        by_key, by_start = self._by_key, self._by_start
        queued, watched, tokens = take_rows(
            self._table.records, rows,
            by_key.nodes, by_key.roots, by_key.sizes, by_start.nodes, by_start.roots, by_start.sizes,
        )  # fmt: skip
        by_key.count -= queued
        by_start.count -= watched
        self.tokens -= tokens

    def peek(self, limit: int, quota: I32, skip: Bool | None = None) -> I32:
        """Pop up to `limit` rows in key order, at most `quota[i]` (used up) of tenant i, for a look.

        `skip`: bool[tenants * LANES], lanes to leave alone. Every row must go back by `put_back` or out by
        `take`.
        """
        if self._kinds > 1:
            lanes = np.zeros((1, LANES), np.bool_) if skip is None else skip.reshape(-1, LANES)
            out = np.zeros((len(quota), self._kinds, LANES), np.bool_)
            out |= lanes[:, None, :]
            out |= self._out[:, None]
            skip = out.reshape(-1)
        return self._by_key.pop(limit, quota, self._kinds * LANES, skip)

    def heads(self, groups: I32, limit: int) -> I32:
        """Pop the first row of each group for each adapter that can be had, up to `limit`; see `peek`."""
        quota = np.zeros((self._by_key.roots.size // LANES // self._kinds, self._kinds, LANES), np.int32)
        quota[groups // LANES, :, groups % LANES] = 1
        quota[:, self._out] = 0
        return self._by_key.pop(min(limit, int(quota.sum())), quota.reshape(-1))

    def stuck(self, limit: int) -> I32:
        """Pop the first row of each tenant for each adapter that can't be had, up to `limit`; see `peek`."""
        tenants = self._by_key.roots.size // LANES // self._kinds
        quota = np.tile(self._out.astype(np.int32), tenants)
        return self._by_key.pop(min(limit, int(quota.sum())), quota, LANES)

    def put_back(self, rows: I32) -> None:
        """Return rows that were looked at and not taken."""
        self._by_key.push_back(rows, self._queues(rows))

    def _queues(self, rows: I32) -> I32:
        """int32[n]: the queues that rows stand in."""
        out = np.empty(rows.size, np.int32)
        find_queues(self._table.records, rows, self._kinds, out)
        return out

    def due(self, now: int, limit: int) -> I32:
        """Pop rows from the latest-start heap that should have started by `now`.

        They stay in their policy queue; `watch` puts one back under a new time.
        """
        return self._by_start.pop_due(float(now - self.origin_ns), limit)

    def watch(self, rows: I32, latest_start_ns: F64) -> None:
        """Put rows that `due` popped back under recomputed latest starts."""
        none = np.zeros(rows.size, np.int32)
        self._by_start.push(rows, none, latest_start_ns - self.origin_ns, self._table.seq[rows])
