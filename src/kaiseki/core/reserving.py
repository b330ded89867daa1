"""Keeping blocks for a waiting request that others went past for long enough (or it might never fit).

A request that needs many blocks lets those behind it pass that need few: that way nothing lies idle. But
as long as such go on coming, the blocks it needs are never free at one time. So from some point on what it
needs counts as taken. Then nothing new starts that would take from it, and what runs ends after a while.
"""

from __future__ import annotations

from kaiseki.core.decision import F64
from kaiseki.core.jit import inlined
from kaiseki.core.lanes import LANES
from kaiseki.core.limits import L_ADMISSION
from kaiseki.core.reasons import Reason
from kaiseki.core.table import Record

_WATERMARK = int(Reason.WATERMARK)


@inlined
def reserve_for(entry: Record, limits: F64, lane_counter: F64, lag_ns: float) -> None:
    """Keep what a waiting entry needs out of what may be admitted, if it is owed to it.

    It is when the entry was passed over too often, or when another lane of its tenant had more than `lag_ns`
    above its own.
    """
    if not entry["waiting"] or entry["reason"] != _WATERMARK:
        return
    group = entry["group"]
    first = group // LANES * LANES
    owed = bool(entry["overdue"])
    for other in range(first, first + LANES):
        owed = owed or lane_counter[other] - lane_counter[group] > lag_ns
    if owed:
        limits[L_ADMISSION] -= entry["pins"] + entry["whole"]
