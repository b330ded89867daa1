"""Writing down what a slot did: records for touched requests, cutoffs for the rest (idea 10)."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I64
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.lanes import LANES
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.reasons import Event, Reason
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import Records

_SELECTED = int(Reason.SELECTED)
_BEHIND = int(Reason.BEHIND)
_ADAPTER = int(Reason.ADAPTER)
_BATCH_CLOSED, _NO_ROW = int(Reason.BATCH_CLOSED), int(Reason.NO_ROW)
_ADMITTED, _RESUMED = int(Event.ADMITTED), int(Event.RESUMED)
_PASSED_OVER, _PAUSED = int(Event.PASSED_OVER), int(Event.PAUSED)


@inlined
def _last_taken(entries: Records) -> tuple[int, int]:
    """Places of the last granted entry that waited, and of the last granted one at all; -1 for none."""
    last_new, last = -1, -1
    for i in range(entries.size):
        if entries[i]["chunk"] > 0:
            last = i
            if entries[i]["waiting"]:
                last_new = i
    return last_new, last


@kernel
def note_entries(records: Records, entries: Records, slot: int, now: int, out: Records) -> int:
    """Write a record for each entry whose situation changed; also counts who was passed over.

    Returns how many records were written to `out`, which has room for one per entry.
    """
    last_new, last = _last_taken(entries)
    best = last_new if last_new >= 0 else last
    other = records[entries[best]["row"]]["seq"] if best >= 0 else -1
    count = 0
    for i in range(entries.size):
        entry = entries[i]
        row = records[entry["row"]]
        if entry["chunk"] > 0:
            same = row["last_reason"] == _SELECTED and not entry["waiting"]
            event = _ADMITTED if entry["waiting"] else _RESUMED
            reason, beneficiary = _SELECTED, -1
            amount = float(entry["chunk"]) if entry["waiting"] else 0.0
        else:
            same = row["last_reason"] == entry["reason"]
            event = _PASSED_OVER if entry["waiting"] else _PAUSED
            reason, beneficiary, amount = entry["reason"], other, entry["short"]
            if entry["waiting"] and i < last_new:
                row["passes"] += 1
        if same:
            continue
        row["last_reason"] = reason
        record = out[count]
        record["slot"] = slot
        record["t_ns"] = now
        record["seq"] = row["seq"]
        record["event"] = event
        record["reason"] = reason
        record["other"] = beneficiary
        record["amount"] = amount
        count += 1
    return count


@kernel
def find_cutoffs(
    records: Records, entries: Records, keys: F64, waiting: I64, slot: int, now: int,
    quiet: int, quiet_short: float, cuts: Records, out: Records,
) -> int:  # fmt: skip
    """Where each tenant's queue was cut in this slot, and by what; tenants without a queue keep theirs.

    Args:
        records, entries: of the slot.
        keys: float64, by row: policy keys.
        waiting: int64[tenants * LANES], how many wait.
        slot, now: of the decision.
        quiet, quiet_short: reason and figure for queues of which nothing was turned away; for
            BEHIND the figure is the queue's length.
        cuts: CUT[tenants], brought up to date.
        out: CUTOFF[tenants], filled with those that say something new.

    Returns how many those are.
    """
    for t in range(cuts.size):
        cut = cuts[t]
        size = 0
        for g in range(t * LANES, (t + 1) * LANES):
            size += waiting[g]
        cut["size"] = size
        cut["new_key"] = -np.inf
        cut["new_seq"] = -1
        cut["new_reason"] = quiet
        cut["short"] = float(size) if quiet == _BEHIND else quiet_short
        cut["turned"] = False
    for i in range(entries.size):
        entry = entries[i]
        if not entry["waiting"]:
            continue
        cut, r = cuts[entry["tenant"]], entry["row"]
        if entry["chunk"] > 0:
            seq = records[r]["seq"]
            if keys[r] > cut["new_key"] or (keys[r] == cut["new_key"] and seq > cut["new_seq"]):
                cut["new_key"] = keys[r]
                cut["new_seq"] = seq
        elif not cut["turned"] and entry["reason"] != _ADAPTER:  # which holds for one adapter only
            cut["turned"] = True
            cut["new_reason"] = entry["reason"]
            cut["short"] = entry["short"]
    n = 0
    for t in range(cuts.size):
        cut = cuts[t]
        same = cut["key"] == cut["new_key"] and cut["seq"] == cut["new_seq"]
        if cut["size"] > 0 and not (same and cut["reason"] == cut["new_reason"]):
            cut["key"] = cut["new_key"]
            cut["seq"] = cut["new_seq"]
            cut["reason"] = cut["new_reason"]
            new = out[n]
            new["slot"] = slot
            new["t_ns"] = now
            new["tenant"] = t
            new["key"] = cut["key"]
            new["seq"] = cut["seq"]
            new["reason"] = cut["reason"]
            new["short_by"] = cut["short"]
            n += 1
    return n


@kernel
def note_slot(
    records: Records, entries: Records, keys: F64, waiting: I64, slot: int, now: int,
    quiet: int, quiet_short: float, cuts: Records, notes: Records, cutoffs: Records,
) -> tuple[int, int]:  # fmt: skip
    """See `note_entries` and `find_cutoffs`; how many of each were written."""
    noted = note_entries(records, entries, slot, now, notes)
    cut = find_cutoffs(records, entries, keys, waiting, slot, now, quiet, quiet_short, cuts, cutoffs)
    return noted, cut


def record_slot(life: Lifecycle, settings: SchedulerSettings, entries: Records, now: int) -> None:
    """Trace what was touched, and the cutoff of every tenant that still waits."""
    trace, running = life.trace, life.table.running_count
    waiting = life.waiting.by_group()
    quiet, short = _BEHIND, 0.0
    if life.policy.whole_batch and running:
        quiet, short = _BATCH_CLOSED, float(running)
    elif running >= settings.max_batch_size:
        quiet, short = _NO_ROW, 1.0
    tenants = waiting.size // LANES
    records, cutoffs = trace.records, trace.cutoffs
    noted, cut = note_slot(
        life.table.records, entries, life.waiting.all_keys(), waiting, life.slot, now, quiet, short,
        trace.cuts(tenants), records.room(entries.size), cutoffs.room(tenants),
    )  # fmt: skip
    records.wrote(noted)
    cutoffs.wrote(cut)
