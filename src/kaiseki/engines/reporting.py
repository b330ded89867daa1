"""From what the core did to metric bins, as arrays, once per slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kaiseki.core.applying import Applied
from kaiseki.core.decision import Decision
from kaiseki.core.endings import Ending
from kaiseki.core.reasons import Event
from kaiseki.core.scheduler import Scheduler
from kaiseki.observe.history import Story
from kaiseki.observe.metrics import Bins


def report_slot(
    bins: Bins,
    scheduler: Scheduler,
    decision: Decision,
    decide_ns: int,
    records: npt.NDArray[np.void],
    cutoffs: npt.NDArray[np.void],
) -> None:
    """One decision: its cost, what it computes, how things stand after it."""
    t, kv = scheduler.table, scheduler.kv
    stopped = records["reason"][records["event"] == Event.PREEMPTED] if decision.preempted.size else ()
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
        cutoffs=cutoffs["reason"].tolist(),
        preempted=[int(reason) for reason in stopped],
    )
    fairness = scheduler.fairness
    bins.set_fairness(fairness.counter / 1e9, fairness.gap_ns() / 1e9, fairness.hard_lag_ns / 1e9)


def write_keys(scheduler: Scheduler, opened: list[tuple[int, Story]]) -> None:
    """Complete the stories of requests (row, story) that came since the last call with their keys."""
    if opened:
        scheduler.life.enqueue_arrivals()
        keys = scheduler.waiting.keys(np.array([row for row, _ in opened], np.int32))
        for (_, story), key in zip(opened, keys.tolist(), strict=True):
            story.key = key
        opened.clear()


def report_load(bins: Bins, scheduler: Scheduler, waiting: int) -> None:
    """How things stand once a slot is over: what has ended in it is gone, what came meanwhile waits."""
    kv = scheduler.kv
    bins.set_load(scheduler.table.running_count, waiting, kv.free_blocks(), kv.live_blocks(), kv.total_blocks)


def report_step(bins: Bins, applied: Applied, took_ns: int) -> None:
    """How long one step took, and its tokens."""
    bins.on_apply(took_ns / 1e9, applied.tokens)


def report_endings(bins: Bins, endings: list[Ending]) -> None:
    """Requests that ended."""
    if endings:
        bins.on_end(endings)
