"""Stall-free chunked prefill: every decode first, the rest of the budget to prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kaiseki.core.policy import Order
from kaiseki.policies.fcfs import Fcfs


@dataclass(frozen=True)
class Sarathi(Fcfs):
    """`fcfs` with decodes ahead of prefills and a budget small enough not to stall them."""

    name: ClassVar[str] = "sarathi"
    budget_tokens: int | None = 512
    order: Order = Order.DECODES_FIRST
