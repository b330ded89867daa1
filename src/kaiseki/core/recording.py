"""Writing down what a slot did: records for touched requests, cutoffs for the rest (idea 10)."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import Bool, Cutoff
from kaiseki.core.filling import Entries
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.reasons import Event, Reason
from kaiseki.core.settings import SchedulerSettings


def record_slot(life: Lifecycle, settings: SchedulerSettings, entries: Entries, now: int) -> None:
    """Trace what was touched, and the cutoff of every tenant that still waits."""
    t, e, slot, trace = life.table, entries, life.slot, life.trace
    granted = e.chunk > 0
    news = e.waiting & granted
    chunks = e.chunk[news].astype(np.float64)
    trace.note(slot, now, t.seq[e.rows[news]], Event.ADMITTED, Reason.SELECTED, chunks)
    resumed = e.rows[granted & ~e.waiting]
    resumed = resumed[t.last_reason[resumed] != Reason.SELECTED]
    trace.note(slot, now, t.seq[resumed], Event.RESUMED, Reason.SELECTED)
    t.last_reason[e.rows[granted]] = Reason.SELECTED
    best = e.rows[news][-1:] if news.any() else e.rows[granted][-1:]
    other = int(t.seq[best[0]]) if best.size else -1
    for waiting, event in ((True, Event.PASSED_OVER), (False, Event.PAUSED)):
        idle = ~granted & (e.waiting == waiting)
        idle &= e.reason != t.last_reason[e.rows]
        rows = e.rows[idle]
        trace.note(slot, now, t.seq[rows], event, e.reason[idle], e.short[idle], other)
        t.last_reason[rows] = e.reason[idle]
    last_new = np.flatnonzero(news)
    if last_new.size:
        passed = e.rows[: last_new[-1]][(e.waiting & ~granted)[: last_new[-1]]]
        t.passes[passed] += 1
    for tenant in np.flatnonzero(life.waiting.counts() > 0):
        _cut(life, settings, int(tenant), e, news)


def _cut(life: Lifecycle, settings: SchedulerSettings, tenant: int, e: Entries, news: Bool) -> None:
    """Where this tenant's queue was cut in this slot, and by what."""
    t, waiting = life.table, life.waiting
    mine = e.rows[news & (e.tenant == tenant)]
    key, seq = -np.inf, -1
    if mine.size:
        keys = waiting.keys(mine)
        last = np.lexsort((t.seq[mine], keys))[-1]
        key, seq = float(keys[last]), int(t.seq[mine[last]])
    turned = np.flatnonzero(e.waiting & (e.chunk == 0) & (e.tenant == tenant))
    if turned.size:
        reason, short = Reason(int(e.reason[turned[0]])), float(e.short[turned[0]])
    elif life.policy.whole_batch and t.running_count:
        reason, short = Reason.BATCH_CLOSED, float(t.running_count)
    elif t.running_count >= settings.max_batch_size:
        reason, short = Reason.NO_ROW, 1.0
    else:
        reason, short = Reason.BEHIND, float(waiting.count(tenant))
    life.trace.cut(Cutoff(life.slot, tenant, key, seq, reason, short))
