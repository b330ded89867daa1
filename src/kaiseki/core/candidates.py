"""Which waiting requests a slot looks at: the first few of each tenant that can still make it."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64
from kaiseki.core.entries import no_entries, waiting_entries
from kaiseki.core.jit import kernel
from kaiseki.core.lanes import LANES
from kaiseki.core.lifecycle import Lifecycle, find_known
from kaiseki.core.reasons import Reason
from kaiseki.core.requests import OnLate
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import Records


def give_up_waiting(life: Lifecycle, window: int, now: int) -> None:
    """Drop or demote waiting requests that can't meet their SLO any more, at most `window`."""
    rows = life.waiting.due(now, window)
    if rows.size == 0:
        return
    known = life.table.prompt[rows] + life.table.outputs[rows]
    cached = life.kv.cached_tokens(rows, known - 1)[:, 0]
    latest = life.latest_start(rows, known - cached)
    can = latest >= now
    life.waiting.watch(rows[can], latest[can])
    life.lose(rows[~can], Reason.HOPELESS, now)


def find_candidates(
    life: Lifecycle, settings: SchedulerSettings, now: int, work_limit: int | None
) -> Records:
    """ENTRY[n]: the best few waiting requests that can still make it.

    `work_limit`: most to look at; None for `settings.window`.
    """
    t, policy, waiting, adapters = life.table, life.policy, life.waiting, life.adapters
    free_rows = settings.max_batch_size - t.running_count
    if len(waiting) == 0 or (policy.whole_batch and t.running_count):
        return no_entries()
    if adapters.slots:
        adapters.want(waiting.by_adapter())
        take_stock(life, settings.max_passes)
    groups = waiting.reachable()
    quota = np.empty(groups.size // LANES, np.int32)
    count = mark_waiting(groups, quota)
    window = max(settings.window, count) if policy.fair else settings.window
    limit = min(window, max(free_rows, 1 if policy.buys or policy.fair else 0))
    limit = min(limit, len(waiting), window if work_limit is None else work_limit)
    if limit <= 0:
        return no_entries()
    if policy.counts_tokens:
        # Whom the counters favour may have the later arrivals, so there are more to choose from.
        window = max(settings.window, count)
        limit = window if work_limit is None else min(window, work_limit)
    # Those whose adapter can't be had take nobody's place among the candidates.
    stuck = _stuck(life, settings.window if work_limit is None else work_limit)
    if work_limit is not None:
        limit = min(limit, work_limit - stuck.size)
    _share_out(life, quota, max(count, 1), limit)
    # Where rows are short, who gets the next one is decided here.
    skip = None
    if policy.fair and limit < len(waiting):
        skip = life.fairness.lanes_ahead(groups)
    rows = waiting.peek(limit, quota, skip)
    new, hopeless = measure(life, settings, np.concatenate([rows, stuck]) if stuck.size else rows, now)
    looked = new.size
    while policy.gives_up and hopeless:
        # The latest-start heap gives up a window of requests per slot; nobody is admitted after it.
        rows = np.ascontiguousarray(new["row"])
        latest = life.latest_start(rows, np.ascontiguousarray(new["need"]))
        lost = (latest < now) & ~t.demoted[rows] & (t.on_late[rows] != OnLate.KEEP)
        np.add.at(quota, t.tenant[rows[lost]], 1)
        life.lose(rows[lost], Reason.HOPELESS, now)
        left = limit if work_limit is None else min(limit, work_limit - looked)
        more = waiting.peek(max(0, min(int(lost.sum()), left)), quota, skip)
        looked += more.size
        new, hopeless = measure(life, settings, np.concatenate([rows[~lost], more]), now)
    return new


def measure(life: Lifecycle, settings: SchedulerSettings, rows: I32, now: int) -> tuple[Records, int]:
    """ENTRY[n]: what each of these waiting requests would need if it were admitted now.

    Also says how many of them are hopeless, see `entries.fill_waiting`.
    """
    t, kv, known = life.table, life.kv, np.empty(rows.size, np.int32)
    rows = np.ascontiguousarray(rows)
    find_known(t.records, rows, known)
    cached = kv.cached_tokens(rows, known)
    return waiting_entries(t, rows, cached, kv.block_tokens, settings.max_passes, now, life.rates)


@kernel
def mark_waiting(groups: I64, out: I32) -> int:
    """Set out[tenant] to whether requests of its lanes (int64[tenants * LANES]) wait. Returns how many do."""
    count = 0
    for t in range(out.size):
        out[t] = 0
        for g in range(t * LANES, (t + 1) * LANES):
            if groups[g] > 0:
                out[t] = 1
        count += out[t]
    return count


def take_stock(life: Lifecycle, max_passes: int) -> int:
    """Find out which adapters can be had now. Returns how many slots are left for any of them."""
    room = life.adapters.take_stock(max_passes)
    life.waiting.leave_out(life.adapters.out_of_reach(room))
    return room


def find_behind(
    life: Lifecycle, window: int, entries: Records, counter: F64, lane_counter: F64, lag_ns: float
) -> I32:
    """Waiting rows for whose sake open entries were put off: the first of each lane that is behind.

    Args:
        life: of the scheduler.
        window: most rows.
        entries: of the slot.
        counter, lane_counter: what they were compared by, and `lag_ns` how far they may be ahead.
    """
    groups = np.flatnonzero(life.waiting.reachable() > 0)
    put_off = entries[entries["open"]]
    tenants, lanes = np.unique(put_off["tenant"]), np.unique(put_off["group"])
    behind = counter[groups // LANES] < counter[tenants].max(initial=-np.inf) - lag_ns
    for group in lanes.tolist():
        behind |= (groups // LANES == group // LANES) & (lane_counter[groups] < lane_counter[group] - lag_ns)
    return life.waiting.heads(groups[behind].astype(np.int32), window)


def _stuck(life: Lifecycle, looks: int) -> I32:
    """The first few waiting rows whose adapter can't be had: that they were passed over is counted."""
    if not life.adapters.slots or looks < 2:
        return np.empty(0, np.int32)
    return life.waiting.stuck(max(looks // 4, 1))


def _share_out(life: Lifecycle, quota: I32, count: int, limit: int) -> None:
    """Set how many of each tenant's waiting requests to look at, given 1 for the `count` that have some.

    Equal parts; where there is room for fewer than there are tenants, one each of those that had least.
    """
    policy, fair = life.policy, life.fairness
    if not (policy.fair or policy.counts_tokens):
        quota.fill(limit)
    elif limit >= count:
        quota.fill(-(-limit // count))
    else:
        waiting = np.flatnonzero(quota)
        quota.fill(0)
        counter = (fair.tokens if policy.counts_tokens else fair.counter)[waiting]
        quota[waiting[np.argpartition(counter, limit - 1)[:limit]]] = 1
