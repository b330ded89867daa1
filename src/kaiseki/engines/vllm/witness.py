"""Who is told what was decided: the seam for a recorder. By itself it lets everything pass."""

from __future__ import annotations

from collections.abc import Sequence

from kaiseki.core.admission import Refusal
from kaiseki.core.decision import Decision, StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.table import Records


class Witness:
    """Is told, on the scheduler's thread, what the core was asked and what it did."""

    def opened(self, core: Scheduler, request: Request, now: int) -> None:
        """A request was queued."""

    def refused(self, core: Scheduler, request: Request, refusal: Refusal, now: int) -> None:
        """A request was refused at once."""

    def decided(
        self, core: Scheduler, decision: Decision, records: Records, cutoffs: Records, now: int
    ) -> None:
        """A slot was decided `now`, ns; `records` and `cutoffs` are what `Trace.drain` gave after it,
        which is overwritten later.
        """

    def applied(self, core: Scheduler, result: StepResult, records: Records) -> None:
        """A step's result was taken in."""

    def ended(self, core: Scheduler, endings: Sequence[Ending]) -> None:
        """Requests ended."""
