"""Granting a slot: offers to all entries, with more of those that wait while some are put off for them."""

from __future__ import annotations

import numpy as np

from kaiseki.core.candidates import find_behind, measure
from kaiseki.core.decision import F64, I64
from kaiseki.core.entries import joined
from kaiseki.core.filling import R_LAG, fill
from kaiseki.core.jit import kernel
from kaiseki.core.lanes import LANES
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.limits import L_ADAPTERS
from kaiseki.core.protocols import N_FEATURES
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import Records


@kernel
def find_deep(groups: I64, looking: bool, deep: I64, lane_deep: I64) -> None:
    """How many requests wait, by tenant and by lane, as `groups` has it; none unless more are looked at.

    A lane that `groups` does not know, as nobody ever waited in it, has none.
    """
    for t in range(deep.size):
        deep[t] = 0
        for g in range(t * LANES, (t + 1) * LANES):
            lane_deep[g] = groups[g] if looking and g < groups.size else 0
            deep[t] += lane_deep[g]


def grant(
    life: Lifecycle,
    settings: SchedulerSettings,
    entries: Records,
    planes: F64,
    rules: F64,
    limits: F64,
    now: int,
) -> tuple[Records, F64]:
    """Walk the entries; while some are put off for others that wait, look at more of these.

    Args:
        life, settings: of the scheduler.
        entries: ENTRY[n], in order.
        planes, rules, limits: see `filling.fill`.
        now: the time, ns.

    Returns:
        The entries with their answers, those looked at later behind the others, and the features of what
        was granted.
    """
    waiting, adapters, fair = life.waiting, life.adapters, life.fairness
    features, trial = np.zeros((2, N_FEATURES))
    counter, lane_counter = fair.comparable()  # the real ones are charged when grants are carried out
    more, lane_more = np.empty(counter.size, np.int32), np.empty(lane_counter.size, np.int32)
    deep, lane_deep = np.empty(counter.size, np.int64), np.empty(lane_counter.size, np.int64)
    looking = settings.window if life.policy.fair else 0
    while True:
        find_deep(waiting.reachable(), looking > 0, deep, lane_deep)
        put_off = fill(
            entries, features, trial, planes, rules, limits, counter, fair.weight,
            more, deep, lane_counter, lane_more, lane_deep, adapters.records,
        )  # fmt: skip
        if adapters.slots:
            waiting.leave_out(adapters.out_of_reach(limits[L_ADAPTERS]))
        if not put_off or looking <= 0:
            return entries, features
        rows = find_behind(life, settings.window, entries, counter, lane_counter, rules[R_LAG])
        stopped = life.table.preempted_slot[rows] == life.slot  # or it would run on at once
        waiting.put_back(rows[stopped])
        rows = rows[~stopped]
        looking = looking - rows.size if rows.size else 0
        entries = joined(entries, measure(life, settings, rows, now)[0])
