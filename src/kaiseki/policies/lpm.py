"""Longest prefix match: whoever finds most of its prompt cached goes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kaiseki.core.decision import F64
from kaiseki.core.policy import Order, Policy
from kaiseki.core.table import View


@dataclass(frozen=True)
class Lpm(Policy):
    """The queue by cached tokens, most first; decodes before prompt chunks, within a token budget.

    As SGLang's default order, after Zheng et al., "SGLang: Efficient Execution of Structured Language Model
    Programs" (NeurIPS 2024). There the whole queue is sorted anew in each step; here a request has its place
    by what was cached when it came, and the `window` at the head is ordered anew by what is cached now.

    A request that finds nothing waits for as long as others come that find something: only one that was
    looked at and passed over `max_passes` times goes first.
    """

    name: ClassVar[str] = "lpm"
    budget_tokens: int | None = 512
    order: Order = Order.DECODES_FIRST

    def key(self, view: View) -> F64:
        """Minus the tokens that were cached when it entered the queue."""
        return _minus_cached(view)

    def rescore(self, view: View, keys: F64, now_ns: int) -> F64:
        """Minus the tokens that are cached now."""
        return _minus_cached(view)


def _minus_cached(view: View) -> F64:
    cached: F64 = (view.uncached - view.prompt - view.outputs).astype(float)
    return cached
