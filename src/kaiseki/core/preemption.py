"""Choosing victims: forced, when memory runs out, and bought, when a newcomer is worth more.

Both are pure choices over arrays; carrying them out is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.core.decision import F64, I32, I64
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.table import View


@dataclass(frozen=True, slots=True)
class Purchase:
    """A discretionary preemption that pays: both sides in seconds of card time.

    Attributes:
        victims: int32[n], rows to stop.
        price: recompute time plus SLO damage.
        value: what the newcomer gains.
    """

    victims: I32
    price: float
    value: float


def miss_probability(slack_ns: F64, tau_ns: float) -> F64:
    """float64[n]: chance that a request with this slack misses if it waits, exp(-slack / tau), at most 1.

    The same exponential as the urgency of A4, read as a probability.
    """
    return np.exp(-np.clip(slack_ns, 0.0, None) / tau_ns)


def slack_ns(view: View, now: int) -> F64:
    """float64[n]: ns to spare before the nearest target, after its lone time; inf without target."""
    due = np.full(view.rows.size, np.inf)
    waiting_first = (view.first_token_ns < 0) & (view.ttft_ns < NEVER_NS)
    due[waiting_first] = (view.arrival_ns + view.ttft_ns)[waiting_first]
    streaming = (view.first_token_ns >= 0) & (view.tbt_ns < NEVER_NS)
    due[streaming] = (view.last_token_ns + view.tbt_ns)[streaming]
    dated = view.deadline_ns < NEVER_NS
    due[dated] = np.minimum(due[dated], (view.arrival_ns + view.deadline_ns)[dated])
    due[view.demoted] = np.inf
    slack: F64 = due - now - view.lone_ns
    return slack


def choose_forced(rows: I32, freed_jointly: I64, shortage: int) -> I32:
    """Cheapest victims whose blocks, freed jointly, cover `shortage`; all of them if even that is short.

    Args:
        rows: candidates in increasing order of cost.
        freed_jointly: int64[n], blocks that stopping rows[:i+1] frees.
        shortage: blocks needed, > 0.

    Returns:
        int32[k]; empty when stopping everybody would free nothing.
    """
    if rows.size == 0 or freed_jointly[-1] <= 0:
        return rows[:0]
    enough = int(np.searchsorted(freed_jointly, shortage))
    return rows[: enough + 1]


def choose_purchase(
    rows: I32, prices: F64, freed_jointly: I64, blocks_short: int, value: float
) -> Purchase | None:
    """The first few victims that make room for one newcomer, if they cost less than it gains.

    Args:
        rows, prices: candidates in increasing order of price (seconds, see `victim_prices`).
        freed_jointly: int64[n] as of `KVSpace.reclaimable`, in that order.
        blocks_short: blocks missing; 0 when only a row is.
        value: seconds, see `newcomer_value`.
    """
    if rows.size == 0 or (blocks_short > 0 and freed_jointly[-1] < blocks_short):
        return None
    count = int(np.searchsorted(freed_jointly, blocks_short)) + 1 if blocks_short > 0 else 1
    price = float(prices[:count].sum())
    return Purchase(rows[:count], price, value) if value > price else None


def wasted_blocks(tokens: I32, block_tokens: int) -> F64:
    """float64[n]: the part of its last block that a request of so many tokens leaves empty, in [0, 1)."""
    wasted: F64 = (-tokens % block_tokens) / block_tokens
    return wasted


def newcomer_value(newcomer: View, now: int, tau_ns: float, slo_lambda: float) -> float:
    """What admitting one request now is worth, seconds: lambda * weight * P(miss if it waits)."""
    chance = miss_probability(slack_ns(newcomer, now), tau_ns)
    return slo_lambda * float(newcomer.weight[0] * chance[0])


def victim_prices(
    victims: View, newcomer: View, now: int, tau_ns: float, slo_lambda: float, loss_ns: F64 | None = None
) -> F64:
    """float64[n], seconds: what stopping each running request costs; inf for those it does not outrank.

    The price is `loss_ns`, by default that of computing its KV again, plus lambda * weight * the rise in its
    own chance of missing once it is set back by that and by the newcomer's work. Equals never displace each
    other: a victim must be of less weight, a later tier, a looser TTFT or demoted, and no better otherwise.
    """
    slack = slack_ns(victims, now)
    lost: F64 = victims.lone_ns if loss_ns is None else loss_ns
    setback = lost + newcomer.lone_ns[0]
    rise = miss_probability(slack - setback, tau_ns) - miss_probability(slack, tau_ns)
    rise[~np.isfinite(slack)] = 0.0
    prices: F64 = lost / 1e9 + slo_lambda * victims.weight * rise
    outranked = (
        (victims.weight < newcomer.weight[0])
        | (victims.tier > newcomer.tier[0])
        | (victims.ttft_ns > newcomer.ttft_ns[0])
        | victims.demoted
    )
    no_worse = (victims.weight <= newcomer.weight[0]) & (victims.tier >= newcomer.tier[0])
    prices[~(outranked & no_worse)] = np.inf
    return prices
