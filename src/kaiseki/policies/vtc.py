"""Virtual token counters: the tenant that was served the fewest weighted tokens goes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.policy import Order, Policy
from kaiseki.core.table import State, View


@dataclass(frozen=True)
class Vtc(Policy):
    """First come, first served inside a tenant; between tenants the least counter goes first.

    After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). The core counts
    `input_weight` for each prompt token of a request when it is first admitted and `output_weight` for each
    output token, over the tenant's weight, and lifts a tenant that returns from idleness. A request counts
    as soon as it is taken, so the next one of the same slot is chosen by counters that include it.

    Two differences: a tenant is idle when it has nothing open (there: nothing waiting), and in a slot at
    most `window` requests are looked at, the same number of each tenant.
    """

    name: ClassVar[str] = "vtc"
    budget_tokens: int | None = 512
    order: Order = Order.DECODES_FIRST
    input_weight: float = 1.0
    output_weight: float = 2.0

    def key(self, view: View) -> F64:
        """Arrival time, ns: the order inside a tenant."""
        return view.arrival_ns.astype(np.float64)

    def rescore(self, view: View, keys: F64, now_ns: int) -> F64:
        """What the tenant's counter will be once those of its requests that come before are taken.

        Per tenant this never decreases, so in its order each request is of a tenant that then has the least.
        """
        tenant = view.tenant
        new = (view.state == State.WAITING) & (view.admitted_ns < 0)
        cost = np.where(new, self.input_weight * view.prompt / view.tenant_weight, 0.0)
        order = np.lexsort((view.seq, keys, tenant))
        before = np.cumsum(cost[order]) - cost[order]
        first = np.flatnonzero(np.diff(tenant[order], prepend=-1))
        out = np.empty(keys.size)
        out[order] = before - np.repeat(before[first], np.diff(first, append=keys.size))
        score: F64 = view.tenant_tokens + out
        return score
