"""The one pass over running rows in a slot: who decodes, who prefills, who can no longer make it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.jit import njit
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.table import RequestTable

# What a running row can do in this slot.
IDLE = 0  # nothing: its last token is in flight
DECODE = 1
BOUND_DECODE = 2  # a decode whose TBT bounds the slot
PREFILL = 3
BLOCKED = 4  # in flight on an engine that takes disjoint rows


LAST_CHANCE = 0.8
"""Part of its allowance that a slot may use when one more late gap loses the request."""


@njit
def allowed_late_gaps(max_tokens: int) -> int:
    """How many of a request's gaps may exceed its TBT: max(1, 1 %)."""
    return max(1, (max_tokens - 1) // 100)


@njit
def lone_ns_left(
    slot_ns: float, token_ns: float, decode_ns: float, uncached: int, outputs: int, min_tokens: int
) -> float:
    """Least time until the last certain token of a request that has `uncached` tokens to compute.

    The first token comes with the prefill's last chunk, each further one costs at least a lone decode.
    """
    if outputs > 0 and uncached <= 1:
        return max(min_tokens - outputs, 1) * decode_ns
    return slot_ns + token_ns * uncached + max(min_tokens - outputs - 1, 0) * decode_ns


@njit
def scan_running(
    rows: I32,
    now: int,
    placeholders: bool,
    slot_ns: float,
    token_ns: float,
    decode_ns: float,
    prompt: I32,
    outputs: I32,
    pending: I32,
    computed: I32,
    max_tokens: I32,
    min_tokens: I32,
    inflight_slot: I64,
    arrival_ns: I64,
    ttft_ns: I64,
    tbt_ns: I64,
    deadline_ns: I64,
    last_token_ns: I64,
    late_gaps: I32,
    demoted: Bool,
    kind: I32,
    need: I32,
    allowance: F64,
    lost: Bool,
) -> None:
    """Fill the last four arrays, parallel to `rows`.

    need: tokens the row could compute now. allowance: ns until its next token would be late (bound
    decodes only, its whole TBT when it is late already). lost: it can't meet its SLO any more.
    """
    for i in range(rows.size):
        r = rows[i]
        out = outputs[r] + pending[r]
        left = prompt[r] + out - computed[r]
        need[i] = left
        lost[i] = False
        if inflight_slot[r] >= 0 and not placeholders:
            kind[i] = BLOCKED
        elif out >= max_tokens[r] or left <= 0:
            kind[i] = IDLE
        elif left == 1 and out > 0 and computed[r] >= prompt[r]:
            kind[i] = DECODE
        else:
            kind[i] = PREFILL
        if demoted[r]:
            continue
        remaining = lone_ns_left(slot_ns, token_ns, decode_ns, left, outputs[r], min_tokens[r])
        if deadline_ns[r] < NEVER_NS and now + remaining > arrival_ns[r] + deadline_ns[r]:
            lost[i] = True
        if outputs[r] == 0:
            if ttft_ns[r] < NEVER_NS:
                first = slot_ns + token_ns * left if inflight_slot[r] < 0 else 0.0
                lost[i] |= now + first > arrival_ns[r] + ttft_ns[r]
        elif tbt_ns[r] < NEVER_NS:
            lost[i] |= late_gaps[r] > allowed_late_gaps(max_tokens[r])
        if kind[i] == DECODE and tbt_ns[r] < NEVER_NS and not lost[i]:
            kind[i] = BOUND_DECODE
            whole = float(tbt_ns[r])
            slack = float(last_token_ns[r] + tbt_ns[r] - now)
            in_time = inflight_slot[r] < 0 and outputs[r] > 0 and slack > decode_ns
            allowance[i] = min(slack, whole) if in_time else whole
            if late_gaps[r] >= allowed_late_gaps(max_tokens[r]):
                allowance[i] *= LAST_CHANCE


@dataclass(slots=True)
class Scan:
    """What running rows can do now; arrays of length n, parallel to `rows`."""

    rows: I32
    kind: I32
    need: I32
    allowance: F64
    lost: Bool

    def without(self, gone: Bool) -> Scan:
        """The same without the marked rows."""
        keep = ~gone
        return Scan(self.rows[keep], self.kind[keep], self.need[keep], self.allowance[keep], self.lost[keep])


def scan(table: RequestTable, now: int, placeholders: bool, rates: tuple[float, float, float]) -> Scan:
    """Scan all running rows; see `scan_running`. `rates` are `costs.lone_rates`."""
    rows = table.running_rows().copy()
    n = rows.size
    found = Scan(
        rows, np.zeros(n, np.int32), np.zeros(n, np.int32), np.full(n, np.inf), np.zeros(n, np.bool_)
    )
    t = table
    scan_running(
        rows,
        now,
        placeholders,
        *rates,
        t.prompt,
        t.outputs,
        t.pending,
        t.computed,
        t.max_tokens,
        t.min_tokens,
        t.inflight_slot,
        t.arrival_ns,
        t.ttft_ns,
        t.tbt_ns,
        t.deadline_ns,
        t.last_token_ns,
        t.late_gaps,
        t.demoted,
        found.kind,
        found.need,
        found.allowance,
        found.lost,
    )
    return found
