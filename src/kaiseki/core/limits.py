"""What a slot has left to give, and what it means that an entry did not get all it could use."""

from __future__ import annotations

from kaiseki.core.decision import F64
from kaiseki.core.jit import inlined
from kaiseki.core.reasons import Reason
from kaiseki.core.table import Record

# Places in the float64 vector of limits that filling uses up.
L_TOKENS, L_ROWS, L_BLOCKS, L_ADMISSION, L_STARVING, L_SOLE = range(6)
"""Tokens; rows, for waiting entries; free KV blocks; blocks below the watermark. The last two are flags:
prefill has starved and gets a quantum regardless; nothing runs yet, so that the watermark may be passed."""
N_LIMITS = 6

_NO_ROW, _NO_KV, _WATERMARK = int(Reason.NO_ROW), int(Reason.NO_KV), int(Reason.WATERMARK)


@inlined
def lacks_room(reason: int) -> bool:
    """Whether a reason says that a row or KV blocks were missing."""
    return reason in (_NO_ROW, _NO_KV, _WATERMARK)


@inlined
def is_blocked(entry: Record, limits: F64) -> bool:
    """Whether an answered entry lacks a row or KV blocks, rather than time."""
    if entry["chunk"] > 0:
        return bool(limits[L_BLOCKS] < 1.0)
    return lacks_room(entry["reason"])
