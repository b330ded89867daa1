"""Composing a slot: in which order entries are offered a grant, and how long the slot may last."""

from __future__ import annotations

import numpy as np

from kaiseki.core.costs import add_decode, predict_ns
from kaiseki.core.decision import F64, I64
from kaiseki.core.entries import ENTRY, joined, running_entries
from kaiseki.core.jit import kernel
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.pausing import ranks_of_decodes
from kaiseki.core.policy import Order, Policy
from kaiseki.core.protocols import F_DECODES, N_FEATURES
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.scan import CONTEXT, N_BOUND, N_DECODES, Scan
from kaiseki.core.table import Records, RequestTable

_FIRST, _EARLY, _DECODES, _LATE = 0.5, 1.0, 2.0, 3.0
"""Phases in which prefills and waiting entries come; `_DECODES` is that of decodes that don't bind."""


def in_order(
    life: Lifecycle,
    found: Scan,
    new: Records,
    now: int,
    first: int,
    planes: F64,
    within_ns: float,
    tokens: float,
    max_passes: int,
) -> Records:
    """ENTRY[n]: running rows and waiting candidates in the order in which they are offered a grant.

    Args:
        life: of the scheduler.
        found: what running rows can do.
        new: entries of waiting candidates.
        now: the time, ns.
        first, max_passes: see `phases_of_prefills`.
        planes: of the cost model.
        within_ns, tokens: how long the slot may last, and how many tokens it may hold: as long as all decodes
            fit, their own order does not matter.
    """
    t, p = life.table, life.policy
    running = running_entries(t, found, life.kv.block_tokens)
    decodes = int(found.counts[N_DECODES])
    crowd = np.zeros(N_FEATURES)
    if decodes:
        add_decode(crowd, float(found.counts[CONTEXT] + decodes))
        crowd[F_DECODES] = decodes
    roomy = predict_ns(planes, crowd) <= within_ns and decodes <= tokens
    others = joined(running[decodes:], new)
    apart = roomy and p.order != Order.ADMISSION
    if apart and others.size == 0:
        return running
    phase = phases_of_prefills(p, t, others, first, max_passes)
    if apart:
        score = scores_of_prefills(p, t, others, _scores(life, others, now))
        return arrange(t, running, others, found, phase, score)
    entries = joined(running[:decodes], others)
    score = scores_of_prefills(p, t, entries, _scores(life, entries, now))
    rank = ranks_of_decodes(t, entries, now, life.rates[2], found.tightest_ns)
    return arrange_all(p, t, entries, np.concatenate([np.zeros(decodes), phase]), rank, score)


def _scores(life: Lifecycle, entries: Records, now: int) -> F64:
    """float64[n]: the policy's order among these entries, smaller first."""
    rows = np.ascontiguousarray(entries["row"])
    view = life.view(rows, entries["need"])
    if life.adapters.slots:
        view.load_ns = life.adapters.loads_of(entries)
    return life.policy.rescore(view, life.waiting.keys(rows), now)


def arrange(
    table: RequestTable, running: Records, others: Records, found: Scan, phase: F64, score: F64
) -> Records:
    """Entries in the order of a slot whose decodes all fit, so that their own order does not matter.

    Args:
        table: the request table.
        running: see `entries.running_entries`.
        others: prefills and waiting candidates.
        found: the scan that `running` was made from.
        phase, score: float64, parallel to `others`.
    """
    order = np.lexsort((table.seq[others["row"]], score, phase))
    out: Records = np.empty(int(found.counts[N_DECODES]) + others.size, ENTRY)
    merge(running, others, int(found.counts[N_BOUND]), int(found.counts[N_DECODES]), order, phase, out)
    return out


@kernel
def merge(
    running: Records, others: Records, bound: int, decodes: int, order: I64, phase: F64, out: Records
) -> None:
    """Write binding decodes, then the others in `order` up to the decodes' phase, more decodes, the rest."""
    at, k = 0, 0
    for i in range(bound):
        out[at] = running[i]
        at += 1
    while k < order.size and phase[order[k]] < _DECODES:
        out[at] = others[order[k]]
        at, k = at + 1, k + 1
    for i in range(bound, decodes):
        out[at] = running[i]
        at += 1
    while k < order.size:
        out[at] = others[order[k]]
        at, k = at + 1, k + 1


def phases_of_prefills(
    policy: Policy, table: RequestTable, others: Records, first: int, max_passes: int
) -> F64:
    """float64[n]: whether prefills and waiting entries come before the decodes that don't bind, or after.

    Args:
        policy: its `order` and `running_first` are honoured.
        table: the request table.
        others: entries that are no decodes.
        first: row that follows right after the decodes that bind, as a purchase was made for it; or -1.
        max_passes: candidates passed over this often come first.
    """
    phase = np.empty(others.size)
    urgency = policy.order == Order.URGENCY
    behind = policy.running_first or policy.order == Order.ADMISSION
    fill_phases(table.records, others, urgency, behind, first, max_passes, phase)
    return phase


@kernel
def fill_phases(
    records: Records, others: Records, urgency: bool, behind: bool, first: int, max_passes: int, out: F64
) -> None:
    """See `phases_of_prefills`; `behind`: waiting entries come after running ones."""
    for i in range(others.size):
        entry = others[i]
        row = records[entry["row"]]
        overdue = entry["waiting"] and row["passes"] >= max_passes
        if urgency:
            timed = row["ttft_ns"] < NEVER_NS or row["tbt_ns"] < NEVER_NS
            out[i] = _EARLY if overdue or (timed and not row["demoted"]) else _LATE
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
