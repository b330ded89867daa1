"""Iteration-level batching: requests join and leave between steps, and a prompt is computed in one piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kaiseki.policies.fcfs import Fcfs


@dataclass(frozen=True)
class Orca(Fcfs):
    """First come, first served, up to `max_batch_size` requests; whole prompts run beside decodes.

    After Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models" (OSDI
    2022). A prompt waits until what the slot still takes suffices for all of it, and nothing overtakes it;
    when nothing else runs it goes even over the token budget. As no step may be larger than the engine
    takes, a request that could need such a step, if it had to be computed again, is refused at submit.
    """

    name: ClassVar[str] = "orca"
    budget_tokens: int | None = None
    chunked: bool = False
