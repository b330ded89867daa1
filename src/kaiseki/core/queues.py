"""Everything that waits: by policy key per tenant, and by latest start for giving up in time."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.heaps import HeapSet
from kaiseki.core.lanes import LANES, lanes_of, per_tenant
from kaiseki.core.table import RequestTable

_DEMOTED = 1e20
"""Added to the arrival (ns) to make the key of demoted requests: they come after all others of their tenant.

Small enough that float64 still tells arrivals apart to about 20 microseconds.
"""


class Waiting:
    """Waiting rows of one replica.

    Two heaps over the same rows: one queue per tenant and lane ordered by policy key, and one ordered by the
    time at which a request must have started to meet its SLO (ns relative to `origin_ns`, so that
    float64 keeps nanosecond order).
    """

    def __init__(self, table: RequestTable, origin_ns: int = 0) -> None:
        self._table = table
        self._by_key = HeapSet(LANES, table.capacity)
        self._by_start = HeapSet(1, table.capacity)
        self.origin_ns = origin_ns
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, row: int) -> bool:
        return row in self._by_key

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
        t = self._table
        for heap in (self._by_key, self._by_start):
            heap.ensure_rows(t.capacity)
        tenants, late = t.tenant[rows], t.demoted[rows]
        self._by_key.ensure_queues((int(tenants.max()) + 1) * LANES)
        groups = tenants * np.int32(LANES) + lanes_of(uncached, late)
        t.group[rows] = groups
        since = (t.arrival_ns[rows] - self.origin_ns).astype(np.float64)
        self._by_key.push(rows, groups, np.where(late, _DEMOTED + since, keys), t.seq[rows])
        watched = ~late & np.isfinite(latest_start_ns)
        self.watch(rows[watched], latest_start_ns[watched])
        self.tokens += int(t.prompt[rows].sum())

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
