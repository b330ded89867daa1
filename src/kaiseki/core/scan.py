"""The one pass over running rows in a slot: who decodes, who prefills, who can no longer make it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.core.decision import I32, I64
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.scratch import Scratch
from kaiseki.core.table import NO_ROW, Record, Records, RequestTable

# What a running row can do in this slot.
IDLE = 0  # nothing: its last token is in flight
DECODE = 1
BOUND_DECODE = 2  # a decode whose TBT bounds the slot
PREFILL = 3
BLOCKED = 4  # in flight on an engine that takes disjoint rows

FOUND = np.dtype(
    [
        ("row", np.int32),
        ("kind", np.int32),
        ("need", np.int32),  # tokens it could compute now
        ("lost", np.bool_),  # it can't meet its SLO any more
    ],
    align=True,
)

# Places in the int64 vector of counts.
N_BOUND, N_DECODES, N_PREFILLS, N_LOST, CONTEXT, GROWTH, PROMISED, OLDEST = range(8)
"""N_DECODES includes N_BOUND. CONTEXT: sum of the decodes' positions. GROWTH: blocks that all decodes,
and the champion's prefill, may need next. PROMISED: blocks that prefills will still take for text they
have. OLDEST: the running row that was admitted first, or NO_ROW."""
N_COUNTS = 8

LAST_CHANCE = 0.8
"""Part of its allowance that prefills may make use of when one more late gap loses the request."""


@inlined
def allowed_late_gaps(max_tokens: int) -> int:
    """How many of a request's gaps may exceed its TBT: max(1, 1 %)."""
    return max(1, (max_tokens - 1) // 100)


@inlined
def lone_ns_left(
    slot_ns: float, token_ns: float, decode_ns: float, uncached: int, outputs: int, min_tokens: int
) -> float:
    """Least time until the last certain token of a request that has `uncached` tokens to compute.

    The first token comes with the prefill's last chunk, each further one costs at least a lone decode.
    """
    if outputs > 0 and uncached <= 1:
        return max(min_tokens - outputs, 1) * decode_ns
    return slot_ns + token_ns * uncached + max(min_tokens - outputs - 1, 0) * decode_ns


@inlined
def is_lost(
    records: Records, r: int, now: int, left: int, slot_ns: float, token_ns: float, decode_ns: float
) -> bool:
    """Whether row r, with `left` tokens to compute, can't meet its SLO even alone from now on."""
    row = records[r]
    if row["demoted"]:
        return False
    outputs, arrival = row["outputs"], row["arrival_ns"]
    lost = False
    if row["deadline_ns"] < NEVER_NS:
        remaining = lone_ns_left(slot_ns, token_ns, decode_ns, left, outputs, row["min_tokens"])
        lost = now + remaining > arrival + row["deadline_ns"]
    if outputs == 0:
        if row["ttft_ns"] < NEVER_NS:
            first = slot_ns + token_ns * left if row["inflight_slot"] < 0 else 0.0
            lost = lost or now + first > arrival + row["ttft_ns"]
    elif row["tbt_ns"] < NEVER_NS:
        lost = lost or row["late_gaps"] > allowed_late_gaps(row["max_tokens"])
    return lost


@inlined
def latest_start_ns(row: Record, uncached: int, slot_ns: float, token_ns: float, decode_ns: float) -> float:
    """When a row with `uncached` tokens to compute must start to meet its SLO alone; inf without target."""
    latest, lone = np.inf, slot_ns + token_ns * uncached
    if row["first_token_ns"] < 0 and row["ttft_ns"] < NEVER_NS:
        latest = row["arrival_ns"] + row["ttft_ns"] - lone
    if row["deadline_ns"] < NEVER_NS:
        rest = max(row["min_tokens"] - row["outputs"] - 1, 0) * decode_ns
        latest = min(latest, row["arrival_ns"] + row["deadline_ns"] - lone - rest)
    return latest


@inlined
def allowance_ns(records: Records, r: int, now: int, decode_ns: float) -> float:
    """Ns until the next token of a decode with a TBT would be late; its whole TBT when it is already."""
    row = records[r]
    tbt = row["tbt_ns"]
    slack = float(row["last_token_ns"] + tbt - now)
    in_time = row["inflight_slot"] < 0 and row["outputs"] > 0 and slack > decode_ns
    return min(slack, float(tbt)) if in_time else float(tbt)


@kernel
def scan_running(
    records: Records,
    rows: I32,
    now: int,
    placeholders: bool,
    gives_up: bool,
    slot_ns: float,
    token_ns: float,
    decode_ns: float,
    block: int,
    champion: int,
    found: Records,
    counts: I64,
) -> tuple[float, float]:
    """Fill `found`, parallel to `rows`, and `counts`.

    Returns the tightest allowance of a decode, ns, with `LAST_CHANCE` and without.
    """
    counts[:] = 0
    counts[OLDEST] = NO_ROW
    tightest, bare = np.inf, np.inf
    for i in range(rows.size):
        r = rows[i]
        row = records[r]
        out = row["outputs"] + row["pending"]
        computed = row["computed"]
        left = row["prompt"] + out - computed
        lost = gives_up and is_lost(records, r, now, left, slot_ns, token_ns, decode_ns)
        if row["inflight_slot"] >= 0 and not placeholders:
            kind = BLOCKED
        elif out >= row["max_tokens"] or left <= 0:
            kind = IDLE
        elif left == 1 and out > 0 and computed >= row["prompt"]:
            kind = DECODE
            counts[N_DECODES] += 1
            counts[CONTEXT] += computed
            if computed % block == 0 or row["shared_tail"]:
                counts[GROWTH] += 1
            if row["tbt_ns"] < NEVER_NS and not lost and not row["demoted"]:
                kind = BOUND_DECODE
                counts[N_BOUND] += 1
                allowance = allowance_ns(records, r, now, decode_ns)
                bare = min(bare, allowance)
                if row["late_gaps"] >= allowed_late_gaps(row["max_tokens"]):
                    allowance *= LAST_CHANCE
                tightest = min(tightest, allowance)
        else:
            kind = PREFILL
            counts[N_PREFILLS] += 1
            end = row["prompt"] + row["outputs"]
            counts[PROMISED] += (end + block - 1) // block - (computed + block - 1) // block
            counts[GROWTH] += r == champion
        counts[N_LOST] += lost
        oldest = counts[OLDEST]
        if oldest == NO_ROW or row["admitted_seq"] < records[oldest]["admitted_seq"]:
            counts[OLDEST] = r
        one = found[i]
        one["row"] = r
        one["kind"] = kind
        one["need"] = left
        one["lost"] = lost
    return tightest, bare


@dataclass(slots=True)
class Scan:
    """What running rows can do now.

    Attributes:
        found: FOUND[n].
        counts: int64[N_COUNTS].
        tightest_ns: how long the slot may last for the decodes' TBT, ns; infinite without any.
        bare_ns: the same without the margin for those that may not be late once more.
    """

    found: Records
    counts: I64
    tightest_ns: float
    bare_ns: float

    @property
    def rows(self) -> I32:
        """int32[n]."""
        rows: I32 = self.found["row"]
        return rows


def scan(
    table: RequestTable,
    now: int,
    placeholders: bool,
    gives_up: bool,
    rates: tuple[float, float, float],
    block: int,
    champion: int,
    buffer: Scratch,
) -> Scan:
    """Scan all running rows; see `scan_running`. `rates` are `costs.lone_rates`, `buffer` is of FOUND."""
    rows = table.running_rows()
    found: Records = buffer.take(rows.size)
    counts: I64 = np.empty(N_COUNTS, np.int64)
    bounds = scan_running(
        table.records, rows, now, placeholders, gives_up, *rates, block, champion, found, counts
    )
    return Scan(found, counts, *bounds)
