"""Speculative decoding: what drafts gain at a batch size, from their acceptance and both models' times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kaiseki.core.protocols import F_CONTEXT, F_DECODES, F_SLOT, N_FEATURES
from kaiseki.cost.cards import Link
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.roofline import Roofline
from kaiseki.cost.transfers import link_ns

MESSAGE_BYTES = 4.0
"""Of a token id."""


def tokens_per_step(acceptance: float, draft_tokens: int) -> float:
    """Expected tokens of one verified step: (1 - a^(k+1)) / (1 - a).

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), equation 1:
    each of k drafts is accepted with probability a if those before it were, and the target adds one.

    Raises:
        ValueError: acceptance is not in [0, 1], or draft_tokens is negative.
    """
    if not 0.0 <= acceptance <= 1.0 or draft_tokens < 0:
        raise ValueError(f"acceptance {acceptance} must be in [0, 1], draft_tokens {draft_tokens} 0 or more")
    return float(sum(acceptance**i for i in range(draft_tokens + 1)))


@dataclass(frozen=True)
class Speculation:
    """A target model and the smaller one that drafts for it.

    Attributes:
        target: verifies; its own `draft_tokens` is not looked at.
        draft: computes one token of each request at a time.
        acceptance: probability that a draft is accepted, given that those before it were. It is lower where
            drafts are computed on another node from older text, so it is an input for each placement.
        apart: the link that drafts and verdicts cross in each step; None where both models share cards or
            are neighbours.
    """

    target: Deployment
    draft: Deployment
    acceptance: float
    apart: Link | None = None
    _targets: dict[int, Roofline] = field(default_factory=dict, init=False, repr=False, compare=False)

    def step_ns(self, draft_tokens: int, decodes: int, context_tokens: int) -> float:
        """One step of all decodes: drafting, sending drafts and verdicts, verifying.

        Args:
            draft_tokens: of each request; 0 is plain decoding.
            decodes: requests in the batch.
            context_tokens: positions that they read together.
        """
        features = np.zeros(N_FEATURES)
        features[F_SLOT] = 1.0
        features[F_DECODES], features[F_CONTEXT] = decodes, context_tokens
        verify_ns = self._verifying(draft_tokens).iteration_ns(features)
        if not draft_tokens:
            return verify_ns
        sent = MESSAGE_BYTES * decodes * draft_tokens
        moved_ns = 0.0 if self.apart is None else 2.0 * link_ns(self.apart, sent)
        return verify_ns + moved_ns + draft_tokens * self._drafting.iteration_ns(features)

    @cached_property
    def _drafting(self) -> Roofline:
        return Roofline(self.draft)

    def _verifying(self, draft_tokens: int) -> Roofline:
        """The target's steps with so many drafts of each request."""
        found = self._targets.get(draft_tokens)
        if found is None:
            found = self._targets[draft_tokens] = Roofline(replace(self.target, draft_tokens=draft_tokens))
        return found

    def speed_up(self, draft_tokens: int, decodes: int, context_tokens: int) -> float:
        """Tokens per second over those of plain decoding."""
        plain = self.step_ns(0, decodes, context_tokens)
        gained = tokens_per_step(self.acceptance, draft_tokens)
        return gained * plain / self.step_ns(draft_tokens, decodes, context_tokens)

    def best_draft_tokens(self, decodes: int, context_tokens: int, most: int = 8) -> int:
        """How many drafts per request give most tokens per second; 0 where speculation does not pay."""
        return max(range(most + 1), key=lambda k: self.speed_up(k, decodes, context_tokens))
