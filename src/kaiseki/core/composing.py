"""Composing a slot: in which order entries are offered a grant, and how long the slot may last."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64
from kaiseki.core.entries import lay_out
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.pausing import ranks_of_decodes
from kaiseki.core.policy import Order, Policy
from kaiseki.core.protocols import N_FEATURES
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.scan import N_BOUND, N_DECODES, N_PREFILLS, Scan
from kaiseki.core.scratch import Scratch
from kaiseki.core.table import Records, RequestTable

_FIRST, _EARLY, _DECODES, _LATE = 0.5, 1.0, 2.0, 3.0
"""Phases in which prefills and waiting entries come; `_DECODES` is that of decodes that don't bind."""
_AHEAD = 0.25
"""What comes first within its phase has so much less."""


def in_order(
    life: Lifecycle,
    found: Scan,
    new: Records,
    now: int,
    first: int,
    planes: F64,
    within_ns: float,
    tokens: float,
    room: float,
    max_passes: int,
) -> Records:
    """ENTRY[n]: running rows and waiting candidates in the order in which they are offered a grant.

    Args:
        life: of the scheduler.
        found: what running rows can do.
        new: entries of waiting candidates.
        now: the time, ns.
        first, room, max_passes: see `fill_phases`.
        planes: of the cost model.
        within_ns, tokens: how long the slot may last, and how many tokens it may hold: as long as all decodes
            fit, their own order does not matter.
    """
    t, p, counts = life.table, life.policy, found.counts
    decodes = int(counts[N_DECODES])
    entries: Records = life.scratch.laid_out.take(decodes + int(counts[N_PREFILLS]) + new.size)
    crowd_ns = lay_out(
        t.records, found.found, counts, life.kv.block_tokens, new, planes, np.zeros(N_FEATURES), entries
    )
    apart = crowd_ns <= within_ns and decodes <= tokens and p.order != Order.ADMISSION
    others = entries[decodes:]
    if apart and others.size == 0:
        return entries
    if apart:
        score = scores_of_prefills(p, t, others, _scores(life, others, now))
        return arrange(p, t, entries, found, first, room, max_passes, score, life.scratch.entries)
    phase = np.zeros(entries.size)
    fill_phases(t.records, others, *_order_of(p), first, room, max_passes, phase[decodes:])
    score = scores_of_prefills(p, t, entries, _scores(life, entries, now))
    rank = ranks_of_decodes(t, entries, now, life.rates[2], found.tightest_ns)
    return arrange_all(p, t, entries, phase, rank, score)


def _order_of(policy: Policy) -> tuple[bool, bool]:
    """Whether urgency orders prefills, and whether waiting entries come after running ones."""
    return policy.order == Order.URGENCY, policy.running_first or policy.order == Order.ADMISSION


def _scores(life: Lifecycle, entries: Records, now: int) -> F64:
    """float64[n]: the policy's order among these entries, smaller first."""
    rows = np.ascontiguousarray(entries["row"])
    view = life.view(rows, entries["need"])
    if life.adapters.slots:
        view.load_ns = life.adapters.loads_of(entries)
    return life.policy.rescore(view, life.waiting.keys(rows), now)


def arrange(
    policy: Policy,
    table: RequestTable,
    entries: Records,
    found: Scan,
    first: int,
    room: float,
    max_passes: int,
    score: F64,
    buffer: Scratch,
) -> Records:
    """Entries in the order of a slot whose decodes all fit, so that their own order does not matter.

    Args:
        policy: its `order` and `running_first` are honoured.
        table: the request table.
        entries: see `entries.lay_out`.
        found: the scan that they were made from.
        first, room, max_passes: see `fill_phases`.
        score: float64, parallel to the entries behind the decodes.
        buffer: of ENTRY.
    """
    out: Records = buffer.take(entries.size)
    phase, order = np.empty(score.size), np.empty(score.size, np.int32)
    merge(
        table.records, entries, found.counts, *_order_of(policy), first, room, max_passes, score, phase,
        order, out,
    )  # fmt: skip
    return out


@inlined
def _before(records: Records, others: Records, phase: F64, score: F64, a: int, b: int) -> bool:
    """Whether entry a comes before b: by phase, score and arrival."""
    if phase[a] != phase[b]:
        return bool(phase[a] < phase[b])
    if score[a] != score[b]:
        return bool(score[a] < score[b])
    return bool(records[others[a]["row"]]["seq"] < records[others[b]["row"]]["seq"])


@kernel
def sort_others(records: Records, others: Records, phase: F64, score: F64, order: I32) -> None:
    """Fill `order` with places in `others`, first to last: a heap sort, as nothing may be allocated here."""
    n = order.size
    for i in range(n):
        order[i] = i
    start, end = n // 2, n
    while end > 1:
        if start > 0:
            start -= 1
        else:
            end -= 1
            order[0], order[end] = order[end], order[0]
        at = start
        while 2 * at + 1 < end:
            child = 2 * at + 1
            if child + 1 < end and _before(records, others, phase, score, order[child], order[child + 1]):
                child += 1
            if not _before(records, others, phase, score, order[at], order[child]):
                break
            order[at], order[child] = order[child], order[at]
            at = child


@kernel
def merge(
    records: Records, entries: Records, counts: I64, urgency: bool, behind: bool, first: int, room: float,
    max_passes: int, score: F64, phase: F64, order: I32, out: Records,
) -> None:  # fmt: skip
    """Write binding decodes, then the others in order up to the decodes' phase, more decodes, the rest.

    `phase`, `order`: scratch, parallel to `score`.
    """
    bound, decodes = counts[N_BOUND], counts[N_DECODES]
    others = entries[decodes:]
    fill_phases(records, others, urgency, behind, first, room, max_passes, phase)
    sort_others(records, others, phase, score, order)
    at, k = 0, 0
    for i in range(bound):
        out[at] = entries[i]
        at += 1
    while k < order.size and phase[order[k]] < _DECODES:
        out[at] = others[order[k]]
        at, k = at + 1, k + 1
    for i in range(bound, decodes):
        out[at] = entries[i]
        at += 1
    while k < order.size:
        out[at] = others[order[k]]
        at, k = at + 1, k + 1


@kernel
def fill_phases(
    records: Records, others: Records, urgency: bool, behind: bool, first: int, room: float, max_passes: int,
    out: F64,
) -> None:  # fmt: skip
    """Whether prefills and waiting entries come before the decodes that don't bind, or after.

    Args:
        records: of the table.
        others: entries that are no decodes.
        urgency, behind: see `_order_of`.
        first: row that follows right after the decodes that bind, as a purchase was made for it; or -1.
        room: blocks for waiting entries. Where not all fit, those that are mostly cached come first in their
            phase (`Order.URGENCY`), or what is admitted before them would evict their prefixes.
        max_passes: candidates passed over this often come first.
        out: float64, parallel to `others`.
    """
    for i in range(others.size):
        if others[i]["waiting"]:
            room -= others[i]["pins"] + others[i]["whole"]
    for i in range(others.size):
        entry = others[i]
        row = records[entry["row"]]
        overdue = entry["waiting"] and row["passes"] >= max_passes
        if urgency:
            timed = row["ttft_ns"] < NEVER_NS or row["tbt_ns"] < NEVER_NS
            out[i] = _EARLY if overdue or (timed and not row["demoted"]) else _LATE
            if overdue or (room < 0.0 and entry["pins"] > entry["whole"]):
                out[i] -= _AHEAD
        else:
            out[i] = _LATE + 1.0 if entry["waiting"] and behind and not overdue else _LATE
        if entry["row"] == first:
            out[i] = _FIRST if urgency else _LATE + 0.5


def scores_of_prefills(policy: Policy, table: RequestTable, others: Records, scores: F64) -> F64:
    """float64[n]: the policy's scores, but order of admission where running prefills keep theirs."""
    keeps = (policy.order == Order.ADMISSION) | policy.running_first
    if not keeps or policy.order == Order.URGENCY:
        return scores
    running = ~others["waiting"]
    return np.where(running, table.admitted_seq[others["row"]].astype(np.float64), scores)


def arrange_all(
    policy: Policy, table: RequestTable, entries: Records, phase: F64, rank: F64, score: F64
) -> Records:
    """Entries in order where decodes compete as well: by phase, rank, score and arrival.

    Args:
        policy: with `Order.ADMISSION` decodes and running prefills go by admission, else decodes lead.
        table: the request table.
        entries: all of them.
        phase: float64[n], of those that are no decodes; ignored for decodes.
        rank: float64[n], see `pausing.ranks_of_decodes`; only `Order.URGENCY` looks at it.
        score: float64[n], of all.
    """
    rows, decode, waiting = entries["row"], entries["decode"], entries["waiting"]
    admitted = table.admitted_seq[rows].astype(np.float64)
    if policy.order == Order.ADMISSION:
        phase = np.where(decode | (~waiting & (phase >= _LATE)), _LATE, phase)
        score = np.where(waiting, score, admitted)
    elif policy.order == Order.DECODES_FIRST:
        phase = np.where(decode, 0.0, phase)
        score = np.where(decode, admitted, score)
    else:
        phase = np.where(decode, np.where(entries["bound"], 0.0, _DECODES), phase)
    ranked = (rank,) if policy.order == Order.URGENCY else ()
    order = np.lexsort((table.seq[rows], score, *ranked, phase))
    ordered: Records = entries[order]
    return ordered


def slot_bound_ns(policy: Policy, found: Scan, tightest_ttft_ns: int) -> float:
    """How long this slot may last, ns: the tightest TBT that binds, else a share of the tightest TTFT."""
    if not policy.time_bound:
        return float(np.inf)
    if found.counts[N_BOUND]:
        return found.tightest_ns
    if tightest_ttft_ns < NEVER_NS:
        return policy.idle_share * tightest_ttft_ns
    return float(np.inf)
