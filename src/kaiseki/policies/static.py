"""Request-level batching: a batch is formed, runs until its last request ends, then the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kaiseki.policies.fcfs import Fcfs


@dataclass(frozen=True)
class StaticBatch(Fcfs):
    """What engines did before continuous batching; the yardstick of request-level scheduling."""

    name: ClassVar[str] = "static"
    budget_tokens: int | None = None
    whole_batch: bool = True
    strict: bool = True
