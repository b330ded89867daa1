"""LoRA adapters: which are loaded, which running requests need, and which goes when another is needed.

A running request *pins* its adapter. One that nobody pins stays loaded until its slot is needed, and the one
used longest ago goes first; while a decision in flight uses it, it stays.
"""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.reasons import Reason
from kaiseki.core.table import Record, Records

_ADAPTER = int(Reason.ADAPTER)

HELD, IDLE, ABSENT, KEPT, OUT = range(5)
"""What one more request for an adapter takes now: nothing; a slot, in which it is loaded already; a slot and
a load; a load into the slot that is kept for it; or it can't be had."""

ADAPTER = np.dtype(
    [
        ("slot", np.int32),  # where it is loaded, or -1
        ("pins", np.int32),  # running requests that need it
        ("passed", np.int32),  # decisions in which it could not be had and later requests were admitted
        ("standing", np.int32),  # one of the five above, brought up to date while a slot is filled
        ("wanted", np.bool_),  # requests wait for it
        ("since", np.int64),  # decision since which it is pinned without a break
        ("used", np.int64),  # last decision that used it
        ("fence", np.int64),  # newest decision that was in flight with it when a request was stopped
        ("counted", np.int64),  # last decision that `passed` counts
    ],
    align=True,
)


def _blank(count: int) -> Records:
    out: Records = np.zeros(count, ADAPTER)
    for name in ("slot", "used", "fence", "counted"):
        out[name] = -1
    return out


@inlined
def _busy(one: Record, retired: int) -> bool:
    """Whether its slot can't be given to another adapter."""
    return bool(one["pins"] > 0 or (one["slot"] >= 0 and one["fence"] > retired))


@inlined
def _drain_one(adapters: Records, retired: int) -> None:
    """Let no further request have the adapter that would otherwise keep its slot longest.

    One that nobody pins any more comes first, then the one pinned for longest: the choice stays the same
    from one decision to the next while all remain pinned.
    """
    chosen, first = -1, 0
    for a in range(adapters.size):
        one = adapters[a]
        if one["standing"] == HELD and _busy(one, retired):
            since = one["since"] if one["pins"] > 0 else -1
            if chosen < 0 or since < first:
                chosen, first = a, since
    if chosen >= 0:
        adapters[chosen]["standing"] = OUT


@kernel
def take_stock(adapters: Records, slots: int, retired: int, max_passes: int) -> int:
    """Say of every adapter what one more request for it takes. Returns how many slots others may have.

    Those passed over `max_passes` times each have a slot kept for them, the most passed over first.
    Where none is free, an adapter that holds one takes no further requests.
    """
    room, kept = slots, 0
    for a in range(adapters.size):
        one = adapters[a]
        busy = _busy(one, retired)
        room -= busy
        one["standing"] = HELD if busy else ABSENT
    while kept < slots:
        most = -1
        for a in range(adapters.size):
            one = adapters[a]
            owed = one["standing"] == ABSENT and one["slot"] < 0 and one["passed"] >= max_passes
            if owed and one["wanted"] and (most < 0 or one["passed"] > adapters[most]["passed"]):
                most = a
        if most < 0:
            break
        if room > 0:
            adapters[most]["standing"] = KEPT
            room -= 1
        else:
            adapters[most]["standing"] = OUT
            _drain_one(adapters, retired)
        kept += 1
    for a in range(adapters.size):
        one = adapters[a]
        if one["standing"] == ABSENT:
            one["standing"] = OUT if room <= 0 else IDLE if one["slot"] >= 0 else ABSENT
    return room


@kernel
def pin(records: Records, rows: I32, adapters: Records, slot: int) -> None:
    """Requests begin to run in this decision."""
    for i in range(rows.size):
        a = records[rows[i]]["adapter"]
        if a >= 0:
            one = adapters[a]
            if one["pins"] == 0:
                one["since"] = slot
            one["pins"] += 1
            one["passed"] = 0


@kernel
def unpin(records: Records, rows: I32, adapters: Records) -> None:
    """Running requests stop or end; what is in flight for them still uses their adapters."""
    for i in range(rows.size):
        row = records[rows[i]]
        if row["adapter"] >= 0:
            one = adapters[row["adapter"]]
            one["pins"] -= 1
            one["fence"] = max(one["fence"], row["inflight_slot"])


@inlined
def _place(adapters: Records, held: I32, retired: int) -> int:
    """An empty slot, else that of the adapter used longest ago among those that may go."""
    chosen = -1
    for place in range(held.size):
        if held[place] < 0:
            return place
        one = adapters[held[place]]
        if not _busy(one, retired) and (chosen < 0 or one["used"] < adapters[held[chosen]]["used"]):
            chosen = place
    return chosen


@kernel
def bring_in(
    records: Records, entries: Records, places: I32, adapters: Records, held: I32,
    slot: int, retired: int, loads: I32,
) -> int:  # fmt: skip
    """Find slots for the adapters of the entries at `places` that are not loaded; marks who caused a load.

    `held`: int32[slots], the adapter in each, or -1. Fills `loads` (adapter, slot); returns how many.
    """
    count = 0
    for i in range(places.size):
        entry = entries[places[i]]
        entry["load"] = False
        a = records[entry["row"]]["adapter"]
        if a < 0:
            continue
        adapters[a]["used"] = slot
        if adapters[a]["slot"] >= 0:
            continue
        place = _place(adapters, held, retired)
        if held[place] >= 0:
            adapters[held[place]]["slot"] = -1
        held[place] = a
        adapters[a]["slot"] = place
        entry["load"] = True
        loads[count, 0] = a
        loads[count, 1] = place
        count += 1
    return count


@kernel
def count_passes(entries: Records, adapters: Records, slot: int) -> int:
    """Count the adapters that could not be had while later entries were admitted.

    Returns how many entries were turned away for want of an adapter.
    """
    last_new, turned = -1, 0
    for i in range(entries.size):
        if entries[i]["waiting"] and entries[i]["chunk"] > 0:
            last_new = i
    for i in range(entries.size):
        entry = entries[i]
        if entry["chunk"] > 0 or entry["reason"] != _ADAPTER:
            continue
        turned += 1
        one = adapters[entry["adapter"]]
        if i < last_new and one["counted"] < slot:
            one["counted"] = slot
            one["passed"] += 1
    return turned


@kernel
def note_loads(entries: Records, adapters: Records, load_ns: float, out: F64) -> None:
    """What loading its adapter would take, for each entry whose adapter is not loaded."""
    for i in range(entries.size):
        entry = entries[i]
        out[i] = 0.0
        if entry["waiting"] and entry["adapter"] >= 0:
            one = adapters[entry["adapter"]]
            if one["slot"] < 0 and one["pins"] == 0:
                out[i] = load_ns


class Adapters:
    """The adapter slots of an engine, and what is in them.

    Adapters are numbered by name as they are first asked for, and stay known; whoever takes names
    from clients should check them against those that exist.

    Args:
        slots: how many adapters can be loaded at a time; 0 where the engine loads none.
        load_ns: how long a load takes.
    """

    def __init__(self, slots: int = 0, load_ns: int = 0) -> None:
        self.slots = slots
        self.load_ns = float(load_ns)
        self.names: list[str] = []
        self.records: Records = _blank(0)
        self.held: I32 = np.full(slots, -1, np.int32)
        self.retired = -1
        self._index: dict[str, int] = {}

    def index(self, name: str) -> int:
        """Number of an adapter."""
        known = self._index.get(name)
        if known is not None:
            return known
        index = self._index[name] = len(self.names)
        self.names.append(name)
        self.records = np.concatenate([self.records, _blank(1)])
        return index

    def want(self, waiting: I64) -> None:
        """Learn how many requests wait for each adapter; one that nobody waits for is owed nothing."""
        wanted = waiting[: self.records.size] > 0
        self.records["wanted"] = wanted
        self.records["passed"][~wanted] = 0

    def take_stock(self, max_passes: int) -> int:
        """See the function of the same name."""
        return take_stock(self.records, self.slots, self.retired, max_passes)

    def out_of_reach(self, room: float) -> Bool:
        """bool[adapters]: which can't be had, with so many slots left for others than those that hold one."""
        standing = self.records["standing"]
        out: Bool = standing == OUT
        if room < 1:
            out |= (standing == IDLE) | (standing == ABSENT)
        return out

    def bring_in(self, records: Records, entries: Records, places: I32, slot: int) -> I32:
        """int32[k, 2]: the adapters to load for this decision, and where; see the function of that name."""
        loads: I32 = np.empty((self.slots, 2), np.int32)
        count = bring_in(records, entries, places, self.records, self.held, slot, self.retired, loads)
        return loads[:count]

    def loads_of(self, entries: Records) -> F64:
        """float64[n]: what loading its adapter would take for each entry, ns."""
        out = np.empty(entries.size)
        note_loads(entries, self.records, self.load_ns, out)
        return out
