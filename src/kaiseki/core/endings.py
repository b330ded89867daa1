"""How requests end: what their owners and the metrics are told, and whether the SLO was met."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kaiseki.core.decision import I32
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.reasons import Event, Finish, Outcome, Reason
from kaiseki.core.scan import allowed_late_gaps
from kaiseki.core.table import Record, Records, State

EVENT_OF = {
    Outcome.COMPLETED: Event.FINISHED,
    Outcome.EXPIRED: Event.EXPIRED,
    Outcome.FAILED: Event.FAILED,
    Outcome.CANCELLED: Event.CANCELLED,
}

ENDED = np.dtype(
    [  # the first fields are those of `Ending` that come out of the table, in its order
        ("row", np.int32),
        ("seq", np.int64),
        ("tenant", np.int32),
        ("cls", np.int32),
        ("attained", np.bool_),
        ("demoted", np.bool_),
        ("arrival_ns", np.int64),
        ("admitted_ns", np.int64),
        ("first_token_ns", np.int64),
        ("prompt", np.int32),
        ("outputs", np.int32),
        ("cached", np.int32),
        ("preemptions", np.int32),
        ("recomputed", np.int64),
        ("late_gaps", np.int32),
        ("service_ns", np.float64),
        ("state", np.int32),
        ("going", np.bool_),  # its KV stays until another replica has it
        ("brought", np.bool_),
        ("inflight_slot", np.int64),
    ],
    align=True,
)

_RUNNING = int(State.RUNNING)


class Ending(NamedTuple):
    """How a request ended, with what its owner and the metrics need; times in ns, counts in tokens."""

    request_id: str
    row: int
    seq: int
    tenant: int
    cls: int
    outcome: Outcome
    finish: Finish
    reason: Reason
    attained: bool
    demoted: bool
    arrival_ns: int
    admitted_ns: int
    first_token_ns: int
    ended_ns: int
    prompt: int
    outputs: int
    cached: int
    preemptions: int
    recomputed: int
    late_gaps: int
    service_ns: float


@inlined
def _attained(row: Record, now: int) -> bool:
    """Whether a completed request met its SLO: TTFT, share of late gaps, deadline."""
    in_time = row["first_token_ns"] - row["arrival_ns"] <= row["ttft_ns"]
    steady = row["late_gaps"] <= allowed_late_gaps(row["max_tokens"])
    due = now - row["arrival_ns"] <= row["deadline_ns"]
    return bool(in_time and steady and due and not row["demoted"])


@kernel
def write_endings(
    records: Records, rows: I32, completed: bool, now: int, slot: int, event: int, reason: int,
    ended: Records, notes: Records,
) -> int:  # fmt: skip
    """Write ENDED[n] and a record each. Returns how many of the rows run and give up all they have now."""
    stopping = 0
    for i in range(rows.size):
        r = rows[i]
        row, end, note = records[r], ended[i], notes[i]
        end["row"] = r
        end["seq"] = row["seq"]
        end["tenant"] = row["tenant"]
        end["cls"] = row["cls"]
        end["attained"] = completed and _attained(row, now)
        end["demoted"] = row["demoted"]
        end["arrival_ns"] = row["arrival_ns"]
        end["admitted_ns"] = row["admitted_ns"]
        end["first_token_ns"] = row["first_token_ns"]
        end["prompt"] = row["prompt"]
        end["outputs"] = row["outputs"]
        end["cached"] = row["cached"]
        end["preemptions"] = row["preemptions"]
        end["recomputed"] = row["recomputed"]
        end["late_gaps"] = row["late_gaps"]
        end["service_ns"] = row["service_ns"]
        end["state"] = row["state"]
        end["going"] = completed and row["hands_over"]
        end["brought"] = row["brought"]
        end["inflight_slot"] = row["inflight_slot"]
        stopping += row["state"] == _RUNNING and not end["going"]
        note["slot"] = slot
        note["t_ns"] = now
        note["seq"] = row["seq"]
        note["event"] = event
        note["reason"] = reason
        note["other"] = -1
        note["amount"] = float(row["outputs"])
    return stopping
