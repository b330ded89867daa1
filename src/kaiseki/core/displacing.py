"""Stopping running requests for others: for a decode's next block, for a tenant's share, for a profit.

Who is chosen follows from `preemption`; here the choice is prepared and carried out. The champion is never
among those that may be stopped.
"""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import I32
from kaiseki.core.entries import shut_out
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.preemption import (
    choose_forced,
    choose_purchase,
    newcomer_value,
    victim_prices,
    wasted_blocks,
)
from kaiseki.core.reasons import Event, Reason
from kaiseki.core.scan import GROWTH, Scan
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import NO_ROW, Records


def make_room(life: Lifecycle, found: Scan, champion: int, now: int) -> I32:
    """Stop the cheapest running rows when decodes (and the champion) can't get their next block."""
    kv = life.kv
    limbo = kv.total_blocks - kv.free_blocks() - kv.live_blocks()
    shortage = int(found.counts[GROWTH]) - kv.free_blocks() - limbo
    if shortage <= 0:
        return np.empty(0, np.int32)
    rows = life.table.running_rows()
    ranked = _cheapest_first(life, rows[rows != champion], now)
    victims = choose_forced(ranked, kv.reclaimable(ranked), shortage)
    if victims.size:
        life.preempt(victims, Event.PREEMPTED, Reason.FORCED_BY_GROWTH, now, float(shortage))
    return victims


def displace(
    life: Lifecycle, settings: SchedulerSettings, entries: Records, champion: int, now: int
) -> tuple[I32, int]:
    """Stop running requests for the first newcomer that found no room, if it may. Victims, newcomer."""
    none = np.empty(0, np.int32)
    out = np.empty(entries.size, np.int32)
    out = out[: shut_out(entries, out)]
    if out.size == 0:
        return none, NO_ROW
    if life.policy.fair:
        victims, newcomer = _repossess(life, entries[out], champion, now)
        if victims.size:
            return victims, newcomer
    out = out[~life.table.demoted[entries["row"][out]]]
    if out.size and life.policy.buys:
        return _buy(life, settings, entries[out[0]], champion, now)
    return none, NO_ROW


def _repossess(life: Lifecycle, shut_out: Records, champion: int, now: int) -> tuple[I32, int]:
    """A tenant further ahead than H gives way to one that lacks room: whoever costs least is stopped."""
    t, fair = life.table, life.fairness
    counters = fair.counter[shut_out["tenant"]]
    i = int(np.argmin(counters))
    rows = t.running_rows()
    ahead = fair.counter[t.tenant[rows]] - counters[i] > fair.hard_lag_ns
    rows = rows[ahead & (rows != champion)]
    if rows.size == 0 or fair.lag_ns <= 0:
        return rows[:0], NO_ROW
    ranked = _cheapest_first(life, rows, now)
    if shut_out["reason"][i] == Reason.NO_ROW:
        victims = ranked[:1]
    else:
        short, freed = int(np.ceil(shut_out["short"][i])), life.kv.reclaimable(ranked)
        # Stopping them for less than it needs would only make them compute everything twice.
        victims = choose_forced(ranked, freed, short) if freed[-1] >= short else ranked[:0]
    newcomer = int(shut_out["row"][i])
    if victims.size:
        gap = float(fair.counter[t.tenant[victims]].max() - counters[i])
        life.preempt(victims, Event.PREEMPTED, Reason.FAIR_SHARE, now, gap, int(t.seq[newcomer]))
    return victims, newcomer


def _buy(
    life: Lifecycle, settings: SchedulerSettings, wants: Records, champion: int, now: int
) -> tuple[I32, int]:
    """Stop running requests for one newcomer that found no room, if that pays."""
    none = np.empty(0, np.int32)
    t, worth = life.table, settings.slo_lambda
    newcomer = life.view(np.array([wants["row"]]), np.array([wants["need"]]))
    tau = life.policy.tau_ms * 1e6
    block, mu = life.kv.block_tokens, settings.kv_mu
    value = newcomer_value(newcomer, now, tau, worth)
    value -= mu * float(wasted_blocks(newcomer.prompt + newcomer.outputs, block)[0])
    if value <= life.rates[0] / 1e9:  # nobody costs less than one slot
        return none, NO_ROW
    rows = t.running_rows()
    rested = t.preempted_slot[rows] + settings.fairness_window < life.slot
    rows = rows[(rows != champion) & rested]
    victims = life.view(rows, t.computed[rows])
    prices = victim_prices(victims, newcomer, now, tau, worth, life.loss_ns(rows, victims.lone_ns))
    prices -= mu * wasted_blocks(t.computed[rows], block)
    order = np.argsort(prices, kind="stable")
    order = order[np.isfinite(prices[order])]
    ranked = rows[order]
    short = 0 if wants["reason"] == Reason.NO_ROW else int(np.ceil(wants["short"]))
    deal = choose_purchase(ranked, prices[order], life.kv.reclaimable(ranked), short, value)
    if deal is None:
        return none, NO_ROW
    seq = int(t.seq[newcomer.rows[0]])
    life.preempt(deal.victims, Event.PREEMPTED, Reason.PURCHASED, now, deal.price, seq)
    life.trace.note(life.slot, now, t.seq[newcomer.rows], Event.ADMITTED, Reason.PURCHASED, deal.value)
    return deal.victims, int(newcomer.rows[0])


def _cheapest_first(life: Lifecycle, rows: I32, now: int) -> I32:
    """Running rows in increasing order of what stopping each loses per block; the youngest loses ties."""
    t = life.table
    held = -(-t.computed[rows].astype(np.int64) // life.kv.block_tokens)
    cost = life.policy.victim_cost(life.view(rows, t.computed[rows]), held, now)
    ranked: I32 = rows[np.lexsort((-t.admitted_seq[rows], cost))]
    return ranked
