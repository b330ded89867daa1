"""Exponential urgency matched to a static slot: the most urgency for the tokens that a slot may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.matching import assign
from kaiseki.core.policy import Order, Policy
from kaiseki.core.table import State, View
from kaiseki.policies.edf import first_due_ns

_BEHIND = 1e15
"""Added to the score of what the matching left out; above any due time in units of tau."""
_LEAST = -700.0
"""Logarithm of the smallest urgency, relative to the largest, that is told from none."""


@dataclass(frozen=True)
class UrgencyMatch(Policy):
    """Urgency `w * exp(-(d - t) / tau)` of each chunk against the card time it takes (A4).

    A slot is one card of the matching: of the candidates those are taken that together are worth most
    within `budget_tokens`, by a greedy over urgency per token and exchanges (`core.matching`). KV is left
    to the core, which grants no more blocks than there are. A prompt longer than the slot counts
    with the part that fits. Against `kaiseki` it lacks the time bound, giving up and fairness, so it tells
    what urgency alone gains over `edf` at the same budget.
    """

    name: ClassVar[str] = "urgency-match"
    budget_tokens: int | None = 512
    order: Order = Order.DECODES_FIRST
    running_first: bool = False
    strict: bool = False

    def key(self, view: View) -> F64:
        """Minus the logarithm of urgency, without t / tau, which all requests share."""
        due: F64 = first_due_ns(view) / (self.tau_ms * 1e6)
        key: F64 = due - np.log(view.weight)
        return key

    def rescore(self, view: View, keys: F64, now_ns: int) -> F64:
        """By density, urgency per token; behind them, in the same order, those that were not matched."""
        if keys.size == 0:
            return keys
        tokens = np.maximum(view.uncached, 1).astype(np.float64)
        log_urgency = -self.key(view)
        density = log_urgency - np.log(tokens)
        room = self._room(view)
        fitting = np.minimum(tokens, max(room, 1.0))
        log_value = density + np.log(fitting)  # of a prompt that is too long, what its part is worth
        value = np.exp(np.maximum(log_value - log_value.max(), _LEAST))
        by_seq = np.argsort(view.seq)  # of two that are alike the earlier is matched
        one = (keys.size, 1)
        cards = assign(
            value[by_seq].reshape(one), fitting[by_seq].reshape(one), np.zeros(one),
            np.array([max(room, 1.0)]), np.zeros(1), np.full(keys.size, -1, np.int32),
        )  # fmt: skip
        score: F64 = -density
        score[by_seq[cards < 0]] += _BEHIND
        return score

    def _room(self, view: View) -> float:
        """Tokens that decodes which are not among the candidates leave of the slot."""
        running = int((view.state == State.RUNNING).sum())
        return float((self.budget_tokens or np.inf) - (view.running - running))
