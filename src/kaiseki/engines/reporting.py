"""From what the core did to metric bins, as arrays, once per slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kaiseki.core.applying import Applied
from kaiseki.core.decision import Cutoff, Decision
from kaiseki.core.lifecycle import Ending
from kaiseki.core.reasons import Event
from kaiseki.core.scheduler import Scheduler
from kaiseki.observe.metrics import Bins


def report_slot(
    bins: Bins,
    scheduler: Scheduler,
    decision: Decision,
    decide_ns: int,
    records: npt.NDArray[np.void],
    cutoffs: list[Cutoff],
) -> None:
    """One decision: its cost, what it computes, how things stand after it."""
    t, kv = scheduler.table, scheduler.kv
    decodes = int(np.count_nonzero(decision.samples))
    bins.on_slot(
        decide_s=decide_ns / 1e9,
        prompt_tokens=int(decision.tokens.sum()) - decodes,
        output_tokens=decodes,
        running=t.running_count,
        waiting=len(scheduler.waiting),
        kv_free=kv.free_blocks(),
        kv_live=kv.live_blocks(),
        kv_total=kv.total_blocks,
        prefix_queried=scheduler.life.prefix_queried,
        prefix_hit=scheduler.life.prefix_hit,
        cutoffs=[int(c.reason) for c in cutoffs],
        preempted=records["reason"][records["event"] == Event.PREEMPTED] if decision.preempted.size else (),
    )
    fairness = scheduler.fairness
    bins.set_fairness(fairness.counter / 1e9, fairness.gap_ns() / 1e9, fairness.hard_lag_ns / 1e9)


def report_load(bins: Bins, scheduler: Scheduler, waiting: int) -> None:
    """How things stand once a slot is over: what has ended in it is gone, what came meanwhile waits."""
    kv = scheduler.kv
    bins.set_load(scheduler.table.running_count, waiting, kv.free_blocks(), kv.live_blocks(), kv.total_blocks)


def report_step(bins: Bins, applied: Applied, took_ns: int) -> None:
    """How long one step took, and its tokens."""
    bins.on_apply(took_ns / 1e9, applied.tokens)


def report_endings(bins: Bins, endings: list[Ending]) -> None:
    """Requests that ended."""
    if not endings:
        return
    e = endings
    bins.on_end(
        tenant=np.array([x.tenant for x in e], np.int32),
        cls=np.array([x.cls for x in e], np.int32),
        outcome=np.array([x.outcome for x in e], np.int32),
        finish=np.array([x.finish for x in e], np.int32),
        reason=np.array([x.reason for x in e], np.int32),
        attained=np.array([x.attained for x in e], np.bool_),
        demoted=np.array([x.demoted for x in e], np.bool_),
        e2e_s=np.array([(x.ended_ns - x.arrival_ns) / 1e9 for x in e]),
        queue_s=np.array([(x.admitted_ns - x.arrival_ns) / 1e9 if x.admitted_ns >= 0 else -1.0 for x in e]),
        prompt_tokens=np.array([x.prompt for x in e], np.int64),
        cached_tokens=np.array([x.cached for x in e], np.int64),
        output_tokens=np.array([x.outputs for x in e], np.int64),
    )
