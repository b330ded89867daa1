"""A policy that knows how long every answer will be: what no server can know, as a reference.

In the simulator a request's `max_tokens` is its true output length, and this policy orders by it. It is no
entry point, since in a server it would order by what clients ask for at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.table import View
from kaiseki.policies.kaiseki import Kaiseki

_BEHIND = 1e15
"""Added to a score to put it behind all that lack it; above any card time, s."""


@dataclass(frozen=True)
class Clairvoyant(Kaiseki):
    """`kaiseki`, but candidates go by the card time that they really need until their end, per weight.

    That is the density order of a knapsack, which is optimal where card time is all that is short and any
    amount can be taken. Those that will not make it at the pace of recent slots come last.
    """

    name: ClassVar[str] = "clairvoyant"

    def rescore(self, view: View, keys: F64, now_ns: int) -> F64:
        """Seconds per weight until the last token, at the pace of recent slots."""
        slot_ns, token_ns = view.pace
        records = view.records
        prefill_ns = token_ns * view.uncached
        left = np.maximum(records["max_tokens"] - records["outputs"] - 1, 0)
        whole_ns = prefill_ns + slot_ns * left
        score = whole_ns / 1e9 / view.weight
        late = np.zeros(keys.size, np.bool_)
        timed = (view.ttft_ns < NEVER_NS) & (records["outputs"] == 0)
        late[timed] = (now_ns + prefill_ns > view.arrival_ns + view.ttft_ns)[timed]
        dated = view.deadline_ns < NEVER_NS
        late[dated] |= (now_ns + whole_ns > view.arrival_ns + view.deadline_ns)[dated]
        out: F64 = score + _BEHIND * late + 2.0 * _BEHIND * view.demoted
        return out
