"""The default policy: urgency order, slots bounded by the tightest TBT, giving up early, fair shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kaiseki.core.decision import F64, I32, I64
from kaiseki.core.jit import kernel
from kaiseki.core.policy import Order, Policy
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.table import Records, View
from kaiseki.policies.edf import PATIENCE_NS

PRIORITY_STEP = 0.1
"""How far one step of a request's own priority moves its deadline, in units of tau."""
_BEHIND = 1e15
"""Added to a score to put it behind all that lack it; above any due time in units of tau."""


@dataclass(frozen=True)
class Kaiseki(Policy):
    """Urgency `w * exp(-(d - t) / tau)`: its logarithm orders requests the same at any t (A4).

    So the key `d / tau - ln w` is static: a weight moves a deadline by `tau * ln w`, and a step of a
    request's own priority by `PRIORITY_STEP * tau`. Among the few
    candidates of a slot, requests with a deadline for their last token are ordered again, by what
    depends on load: at the pace of recent slots, those that will still make it come first, the least
    remaining time per weight before others, and those that won't come last.
    """

    name: ClassVar[str] = "kaiseki"
    order: Order = Order.URGENCY
    time_bound: bool = True
    running_first: bool = False
    strict: bool = False
    gives_up: bool = True
    fair: bool = True
    buys: bool = True

    def key(self, view: View) -> F64:
        """Minus the logarithm of urgency, without the part that all requests share."""
        key = np.empty(view.rows.size)
        log_urgency(view.records, self.tau_ms * 1e6, key)
        return key

    def rescore(self, view: View, keys: F64, now_ns: int) -> F64:
        """Deadlines by remaining time per weight, behind them those that would miss at this pace.

        An adapter that has to be loaded first makes a request less urgent by the load over `tau`.
        """
        out = np.empty(keys.size)
        order_by_pace(view.records, view.uncached, keys, *view.pace, float(now_ns), self.tau_ms * 1e6, out)
        if view.load_ns.size:
            out += view.load_ns / (self.tau_ms * 1e6)
        return out

    def victim_cost(self, view: View, blocks: I64, now_ns: int) -> F64:
        """Loss per block freed: the time to compute it again, plus what an undemoted request is worth.

        Twice that for who was stopped once, and so on. Per block a long prompt is the cheapest to stop, so
        that the same ones would go again and again.
        """
        worth = np.where(view.demoted, 0.0, view.weight)
        loss = (view.lone_ns / 1e9 + worth) * (1.0 + view.preemptions)
        per_block: F64 = loss / np.maximum(blocks, 1)
        return per_block


@kernel
def log_urgency(records: Records, tau_ns: float, out: F64) -> None:
    """See `Kaiseki.key`."""
    for i in range(records.size):
        row = records[i]
        first = min(row["ttft_ns"], row["deadline_ns"])
        due = row["arrival_ns"] + (first if first < NEVER_NS else PATIENCE_NS)
        out[i] = due / tau_ns - np.log(row["weight"]) + PRIORITY_STEP * row["priority"]


@kernel
def order_by_pace(
    records: Records,
    uncached: I32,
    keys: F64,
    slot_ns: float,
    token_ns: float,
    now_ns: float,
    tau_ns: float,
    out: F64,
) -> None:
    """See `Kaiseki.rescore`; the pace is `View.pace`."""
    for i in range(keys.size):
        row = records[i]
        score = keys[i]
        if row["demoted"]:
            score += 2.0 * _BEHIND
        elif row["deadline_ns"] < NEVER_NS:
            paced_ns = token_ns * uncached[i] + slot_ns * max(row["min_tokens"] - row["outputs"] - 1, 0)
            score = paced_ns / (tau_ns * row["weight"]) + PRIORITY_STEP * row["priority"]
            if now_ns + paced_ns > row["arrival_ns"] + row["deadline_ns"]:
                score += _BEHIND
        out[i] = score
