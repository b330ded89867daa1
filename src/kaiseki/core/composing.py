"""Composing a slot: which entries are offered a grant, in which order, and within which limits."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, Bool
from kaiseki.core.filling import Entries
from kaiseki.core.policy import Order, Policy
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.scan import BOUND_DECODE, DECODE, PREFILL, Scan
from kaiseki.core.table import RequestTable


def entries_of(table: RequestTable, found: Scan, new: Entries, block: int) -> Entries:
    """Running rows that can do something, then the waiting candidates, as one set of entries."""
    able = (found.kind == DECODE) | (found.kind == BOUND_DECODE) | (found.kind == PREFILL)
    rows = found.rows[able]
    n = rows.size
    start = table.computed[rows]
    zeros = np.zeros(n, np.int32)
    copy = (table.shared_tail[rows] & (start % block != 0)).astype(np.int32)
    return Entries(
        rows=np.concatenate([rows, new.rows]),
        decode=np.concatenate([found.kind[able] != PREFILL, new.decode]),
        waiting=np.concatenate([np.zeros(n, np.bool_), new.waiting]),
        start=np.concatenate([start, new.start]),
        need=np.concatenate([found.need[able], new.need]),
        pins=np.concatenate([zeros, new.pins]),
        copy=np.concatenate([copy, new.copy]),
        whole=np.concatenate([zeros, new.whole]),
        tenant=np.concatenate([table.tenant[rows], new.tenant]),
        chunk=np.zeros(n + new.rows.size, np.int32),
        reason=np.zeros(n + new.rows.size, np.int32),
        short=np.zeros(n + new.rows.size),
    )


def reorder(entries: Entries, order: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Entries:
    """The same entries in another order."""
    e = entries
    return Entries(
        e.rows[order],
        e.decode[order],
        e.waiting[order],
        e.start[order],
        e.need[order],
        e.pins[order],
        e.copy[order],
        e.whole[order],
        e.tenant[order],
        e.chunk[order],
        e.reason[order],
        e.short[order],
    )


def order_of(
    policy: Policy,
    table: RequestTable,
    entries: Entries,
    bound: Bool,
    scores: F64,
    first: int,
    max_passes: int,
    roomy: bool,
) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Permutation in which entries are offered a grant.

    Args:
        policy: its `order` and `running_first` are honoured.
        table: the request table.
        entries: see `entries_of`.
        bound: bool[n], decodes whose TBT bounds the slot.
        scores: float64[n], the policy's order among prefills, smaller first.
        first: row that follows right after the decodes that bind, as a purchase was made for it; or -1.
        max_passes: candidates passed over this often come first among those waiting.
        roomy: all decodes fit, so their order among themselves does not matter.
    """
    rows, decode, waiting = entries.rows, entries.decode, entries.waiting
    admitted = table.admitted_seq[rows].astype(np.float64)
    if policy.order == Order.ADMISSION:
        phase = np.where(waiting, 2, 1)
        score = np.where(waiting, scores, admitted)
    elif policy.order == Order.DECODES_FIRST:
        phase = np.where(decode, 0, np.where(waiting & policy.running_first, 2, 1))
        score = np.where(decode | (~waiting & policy.running_first), admitted, scores)
    else:
        timed = (table.ttft_ns[rows] < NEVER_NS) | (table.tbt_ns[rows] < NEVER_NS)
        urgent = timed & ~table.demoted[rows]
        phase = np.where(decode, np.where(bound, 0, 2), np.where(urgent, 1, 3))
        score = np.where(decode & roomy, 0.0, scores)
    phase = np.where(waiting & (table.passes[rows] >= max_passes), 1, phase)
    phase = np.where(rows == first, 1.5 if policy.order == Order.ADMISSION else 0.5, phase)
    return np.lexsort((table.seq[rows], score, phase))


def no_entries() -> Entries:
    """An empty set."""
    none, flags = np.empty(0, np.int32), np.empty(0, np.bool_)
    return Entries(
        none, flags, flags, none, none, none, none, none, none, none.copy(), none.copy(), np.empty(0)
    )


def slot_bound_ns(policy: Policy, found: Scan, tightest_ttft_ns: int) -> float:
    """How long this slot may last, ns: the tightest TBT that binds, else a share of the tightest TTFT."""
    if not policy.time_bound:
        return float(np.inf)
    bound = found.allowance[found.kind == BOUND_DECODE]
    if bound.size:
        return float(bound.min())
    if tightest_ttft_ns < NEVER_NS:
        return policy.idle_share * tightest_ttft_ns
    return float(np.inf)


def promised_blocks(table: RequestTable, found: Scan, block: int) -> int:
    """Blocks that running prefills will still take for text they already have."""
    rows: I32 = found.rows[found.kind == PREFILL]
    end = table.prompt[rows] + table.outputs[rows]
    start = table.computed[rows]
    return int(((end + block - 1) // block - (start + block - 1) // block).sum())
