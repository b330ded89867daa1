"""Everything that waits: by policy key per tenant, and by latest start for giving up in time."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.heaps import HeapSet
from kaiseki.core.jit import kernel
from kaiseki.core.lanes import LANES, lane_of, per_tenant
from kaiseki.core.table import Records, RequestTable

_DEMOTED = 1e20
"""Added to the arrival (ns) to make the key of demoted requests: they come after all others of their tenant.

Small enough that float64 still tells arrivals apart to about 20 microseconds.
"""


@kernel
def place_rows(
    records: Records, rows: I32, keys: F64, latest_start_ns: F64, uncached: I32, origin_ns: int,
    groups: I32, by_key: F64, key_seq: I64, by_start: F64, start_seq: I64, watched: I32,
) -> tuple[int, int]:  # fmt: skip
    """Find the lanes of rows, and write their keys into both heaps' arrays (by row).

    `groups` gets tenant * LANES + lane, and `watched` the rows that have a latest start. Returns how many
    those are, and the sum of all prompts.
    """
    n, tokens = 0, 0
    for i in range(rows.size):
        r = rows[i]
        row = records[r]
        late = row["demoted"]
        groups[i] = row["tenant"] * LANES + lane_of(uncached[i], late)
        row["group"] = groups[i]
        by_key[r] = _DEMOTED + float(row["arrival_ns"] - origin_ns) if late else keys[i]
        key_seq[r] = row["seq"]
        tokens += row["prompt"]
        if not late and np.isfinite(latest_start_ns[i]):
            by_start[r] = latest_start_ns[i] - origin_ns
            start_seq[r] = row["seq"]
            watched[n] = r
            n += 1
    return n, tokens


class Waiting:
    """Waiting rows of one replica.

    Two heaps over the same rows: one queue per tenant and lane ordered by policy key, and one ordered by the
    time at which a request must have started to meet its SLO (ns relative to `origin_ns`, so that
    float64 keeps nanosecond order). New arrivals are counted at once and come into the heaps together,
    before anybody looks.
    """

    def __init__(self, table: RequestTable, origin_ns: int = 0) -> None:
        self._table = table
        self._by_key = HeapSet(LANES, table.capacity)
        self._by_start = HeapSet(1, table.capacity)
        self.origin_ns = origin_ns
        self.tokens = 0
        self._arrived: list[int] = []

    def __len__(self) -> int:
        return len(self._by_key) + len(self._arrived)

    def __contains__(self, row: int) -> bool:
        return row in self._by_key or row in self._arrived

    def arrive(self, row: int, prompt_tokens: int) -> None:
        """Count a row that `take_arrivals` will give to whoever adds it."""
        self._arrived.append(row)
        self.tokens += prompt_tokens

    def take_arrivals(self) -> I32:
        """Rows that arrived and are in no heap yet; they count no more until they are added."""
        rows: I32 = np.array(self._arrived, np.int32)
        if rows.size:
            self._arrived.clear()
            self.tokens -= int(self._table.prompt[rows].sum())
        return rows

    def keys(self, rows: I32) -> F64:
        """float64[n]: policy keys under which rows wait, or waited last."""
        return self._by_key.key[rows]

    def all_keys(self) -> F64:
        """float64[capacity], by row: policy keys under which rows wait, or waited last."""
        return self._by_key.key

    def count(self, tenant: int) -> int:
        """How many requests of a tenant wait."""
        return int(self._by_key.sizes[tenant * LANES : (tenant + 1) * LANES].sum())

    def counts(self) -> I64:
        """int64[tenants seen so far]: how many wait."""
        return per_tenant(self._by_key.sizes)

    def by_group(self) -> I64:
        """int64[tenants * LANES]: how many wait in each lane of each tenant seen so far."""
        return self._by_key.sizes

    def add(self, rows: I32, keys: F64, latest_start_ns: F64, uncached: I32) -> None:
        """Queue rows under policy keys, in the lanes of their sizes; a latest start may be infinite.

        `uncached`: int32[n], tokens to compute. The table's `group` says afterwards where each row is.
        """
        t, by_key, by_start = self._table, self._by_key, self._by_start
        by_key.ensure_rows(t.capacity)
        by_start.ensure_rows(t.capacity)
        by_key.ensure_queues((int(t.tenant[rows].max()) + 1) * LANES)
        groups, watched = np.empty((2, rows.size), np.int32)
        n, tokens = place_rows(
            t.records, rows, keys, latest_start_ns, uncached, self.origin_ns,
            groups, by_key.key, by_key.seq, by_start.key, by_start.seq, watched,
        )  # fmt: skip
        by_key.push_back(rows, groups)
        by_start.push_back(watched[:n], np.zeros(n, np.int32))
        self.tokens += tokens

    def take(self, rows: I32) -> None:
        """Remove rows that were added: they start, end or change their keys."""
        if rows.size == 0:
            return
        self._by_key.remove(rows)
        self._by_start.remove(rows)
        self.tokens -= int(self._table.prompt[rows].sum())

    def peek(self, limit: int, quota: I32, skip: Bool | None = None) -> I32:
        """Pop up to `limit` rows in key order, at most `quota[i]` (used up) of tenant i, for a look.

        `skip`: bool[tenants * LANES], lanes to leave alone. Every row must go back by `put_back` or out by
        `take`.
        """
        return self._by_key.pop(limit, quota, LANES, skip)

    def heads(self, groups: I32, limit: int) -> I32:
        """Pop the first row of each of these groups, up to `limit`; see `peek`."""
        quota = np.zeros(self._by_key.roots.size, np.int32)
        quota[groups] = 1
        return self._by_key.pop(min(limit, groups.size), quota)

    def put_back(self, rows: I32) -> None:
        """Return rows that were looked at and not taken."""
        self._by_key.push_back(rows, self._table.group[rows])

    def due(self, now: int, limit: int) -> I32:
        """Pop rows from the latest-start heap that should have started by `now`.

        They stay in their policy queue; `watch` puts one back under a new time.
        """
        return self._by_start.pop_due(float(now - self.origin_ns), limit)

    def watch(self, rows: I32, latest_start_ns: F64) -> None:
        """Put rows that `due` popped back under recomputed latest starts."""
        none = np.zeros(rows.size, np.int32)
        self._by_start.push(rows, none, latest_start_ns - self.origin_ns, self._table.seq[rows])
