"""Granting a slot: offers to all entries, with more of those that wait while some are put off for them."""

from __future__ import annotations

import numpy as np

from kaiseki.core.candidates import find_behind, measure
from kaiseki.core.decision import F64
from kaiseki.core.entries import joined
from kaiseki.core.filling import R_LAG, fill, no_features
from kaiseki.core.lanes import LANES, per_tenant
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.limits import L_ADAPTERS
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import Records


def grant(
    life: Lifecycle, settings: SchedulerSettings, entries: Records, planes: F64, rules: F64, limits: F64
) -> tuple[Records, F64]:
    """Walk the entries; while some are put off for others that wait, look at more of these.

    Args:
        life, settings: of the scheduler.
        entries: ENTRY[n], in order.
        planes, rules, limits: see `filling.fill`.

    Returns:
        The entries with their answers, those looked at later behind the others, and the features of what
        was granted.
    """
    waiting, adapters, fair = life.waiting, life.adapters, life.fairness
    features, trial = no_features(), no_features()
    counter, lane_counter = fair.comparable()  # the real ones are charged when grants are carried out
    more, lane_more = np.zeros(counter.size, np.int32), np.zeros(lane_counter.size, np.int32)
    lane_deep = np.zeros(lane_counter.size, np.int64)
    deep = np.zeros(counter.size, np.int64)
    looking = settings.window if life.policy.fair else 0
    while True:
        if looking > 0:
            groups = waiting.reachable()[: lane_deep.size]  # one tenant too many before the first
            lane_deep[: groups.size] = groups
            deep[: groups.size // LANES] = per_tenant(groups)
        else:
            deep[:], lane_deep[:] = 0, 0
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
        entries = joined(entries, measure(life, settings, rows))
