"""What a policy is: frozen settings that the core reads, and pure functions over arrays.

A policy orders requests; it never sees the clock, the engine or a queue, and nothing calls back into
it from compiled code. See `docs/policies.md` for how to write one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import numpy as np

from kaiseki.core.decision import F64, I64
from kaiseki.core.table import View


class Order(IntEnum):
    """In which order requests that already run are considered within a slot."""

    ADMISSION = 0
    """Oldest admission first, decodes and prefills alike (vLLM's default)."""
    DECODES_FIRST = 1
    """All decodes, then running prefills by admission (stall-free)."""
    URGENCY = 2
    """Decodes bound by a TBT, then urgent prefills, other decodes and the rest by score."""


@dataclass(frozen=True)
class Policy:
    """Base of all policies; every field is something the core enforces.

    Attributes:
        budget_tokens: most tokens in one slot; None leaves it to `time_bound` and the engine's limit.
        order: in which order running requests are considered.
        time_bound: the tightest TBT of the batch bounds the slot's predicted length.
        running_first: running prefills come before anything that waits, whatever their scores.
        strict: the first waiting request that can't be taken ends the scan (head-of-line).
        whole_batch: admit only when nothing runs (request-level batching).
        chunked: prompts may be split over slots.
        gives_up: requests that can no longer meet their SLO are demoted or dropped, as their class says.
        fair: tenants are held within the fairness lag of each other.
        buys: a more urgent newcomer may preempt, at a recorded profit.
        idle_share: with no TBT to bound it, a slot lasts at most this share of the tightest TTFT.
        tau_ms: time scale of urgency, ms: a slack of tau makes a miss e times less likely.
        input_weight, output_weight: what a tenant is charged for each prompt token it is admitted with, and
            for each output token; both 0 switches the counting off. See `View.tenant_tokens`.
        starving_slots: after so many slots without any prefill, the first one gets a quantum regardless.
    """

    name: ClassVar[str] = "policy"

    budget_tokens: int | None = None
    order: Order = Order.DECODES_FIRST
    time_bound: bool = False
    running_first: bool = True
    strict: bool = True
    whole_batch: bool = False
    chunked: bool = True
    gives_up: bool = False
    fair: bool = False
    buys: bool = False
    idle_share: float = 0.35
    tau_ms: float = 1000.0
    input_weight: float = 0.0
    output_weight: float = 0.0
    starving_slots: int = 64

    @property
    def counts_tokens(self) -> bool:
        """Tenants are charged by weighted tokens, and candidates of all of them are looked at."""
        return self.input_weight > 0.0 or self.output_weight > 0.0

    def key(self, view: View) -> F64:
        """float64[n]: static place in the queue, smaller first; ties go to the earlier arrival.

        Computed at submit and when a request returns to the queue, never per slot.
        """
        return np.zeros(view.rows.size)

    def rescore(self, view: View, keys: F64, now_ns: int) -> F64:
        """float64[n]: order among the few candidates looked at in this slot, smaller first."""
        return keys

    def victim_cost(self, view: View, blocks: I64, now_ns: int) -> F64:
        """float64[n]: who loses its KV first when memory runs out: the smallest.

        Args:
            view: running requests that may be stopped.
            blocks: int64[n], blocks that stopping each alone would free.
            now_ns: the time.
        """
        return -view.admitted_seq.astype(np.float64)
