"""Shortest remaining processing time: what is predicted to be done first goes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kaiseki.core.decision import F64
from kaiseki.core.policy import Order, Policy
from kaiseki.core.table import View


@dataclass(frozen=True)
class Srpt(Policy):
    """Waiting requests and running prefills alike go by predicted time to the last certain output token.

    The prediction is that of the uncached part of the prompt plus `min_tokens` output tokens, at the pace of
    recent slots; no more of the output is known. A newcomer overtakes a prefill that has more left to do,
    but takes nothing from it: preemption is one of order only.

    This order starves long requests while shorter ones keep coming. Only two floors of the core limit that,
    for those that are looked at in a slot (`window`): a request that was passed over `max_passes` times comes
    first, and a prefill gets a quantum after `starving_slots` without any. With `fair` switched on, size
    lanes share what a slot can compute, and a long request is not starved by shorter ones for want of that.
    """

    name: ClassVar[str] = "srpt"
    budget_tokens: int | None = 512
    order: Order = Order.DECODES_FIRST
    running_first: bool = False

    def key(self, view: View) -> F64:
        """Predicted ns when it entered the queue; the pace may have changed since."""
        return view.paced_ns

    def rescore(self, view: View, keys: F64, now_ns: int) -> F64:
        """Predicted ns now: of running prefills less is left than when they came."""
        return view.paced_ns
