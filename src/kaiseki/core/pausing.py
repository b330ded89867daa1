"""Which decodes pause when all of them together would take longer than the tightest TBT allows."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.jit import kernel
from kaiseki.core.scan import allowance_ns
from kaiseki.core.table import Records, RequestTable

_CAN_WAIT = 1e15
"""Added to the rank of decodes that are in time without this slot; above any TBT, ns."""


def ranks_of_decodes(
    table: RequestTable, entries: Records, now: int, decode_ns: float, slot_ns: float
) -> F64:
    """float64[n]: in which order decodes with a TBT go, before any other criterion; 0 for other entries.

    First those that would be late by the next slot, the tightest TBT first: it is for their sake that the
    slot is short, so they may not be the ones that pause. Then those that can wait, the least time left
    first; who is late already comes last, as this slot or the next makes no difference to it.

    Args:
        table: the request table.
        entries: ENTRY[n].
        now: the time, ns.
        decode_ns: what a lone decode takes.
        slot_ns: how long the slot may last for the tightest of them.
    """
    out = np.zeros(entries.size)
    rank_decodes(table.records, entries, now, decode_ns, slot_ns, out)
    return out


@kernel
def rank_decodes(
    records: Records, entries: Records, now: int, decode_ns: float, slot_ns: float, out: F64
) -> None:
    """See `ranks_of_decodes`."""
    for i in range(entries.size):
        if entries[i]["bound"]:
            r = entries[i]["row"]
            left = allowance_ns(records, r, now, decode_ns)
            out[i] = _CAN_WAIT + left if left >= 2.0 * slot_ns else records[r]["tbt_ns"]
