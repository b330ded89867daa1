"""What a slot has left to give, and what it means that an entry did not get all it could use."""

from __future__ import annotations

from kaiseki.core.decision import F64
from kaiseki.core.jit import inlined
from kaiseki.core.reasons import Reason
from kaiseki.core.table import Record

# Places in the float64 vector of limits that filling uses up.
L_TOKENS, L_ROWS, L_BLOCKS, L_ADMISSION, L_STARVING, L_SOLE, L_ADAPTERS, L_LOADING = range(8)
"""Tokens; rows, for waiting entries; free KV blocks; blocks below the watermark. Then two flags:
prefill has starved and gets a quantum regardless; nothing runs yet, so that the watermark may be passed.
Adapter slots; and, growing from 0, the time that loading adapters takes, ns."""
N_LIMITS = 8

_NO_ROW, _NO_KV, _WATERMARK = int(Reason.NO_ROW), int(Reason.NO_KV), int(Reason.WATERMARK)
_ADAPTER = int(Reason.ADAPTER)


@inlined
def lacks_room(reason: int) -> bool:
    """Whether a reason says that a row or KV blocks were missing."""
    return reason in (_NO_ROW, _NO_KV, _WATERMARK)


@inlined
def is_blocked(entry: Record, limits: F64) -> bool:
    """Whether an answered entry lacks a row, KV blocks or an adapter, rather than time."""
    if entry["chunk"] > 0:
        return bool(limits[L_BLOCKS] < 1.0)
    return lacks_room(entry["reason"]) or bool(entry["reason"] == _ADAPTER)
