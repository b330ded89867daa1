"""Who is told what was decided: the seam for a recorder. By itself it lets everything pass."""

from __future__ import annotations

from collections.abc import Sequence

from kaiseki.core.admission import Refusal
from kaiseki.core.decision import Decision, StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.table import Records
from kaiseki.observe.recorder.flight import FlightRecorder, load_of


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


class Recorded(Witness):
    """Hands everything to a flight recorder, which `kaiseki explain --recorder` reads from outside.

    Args:
        recorder: of this rank.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder

    def opened(self, core: Scheduler, request: Request, now: int) -> None:
        """See `Witness`."""
        row, table = core.life.ids[request.id], core.table
        seq, tenant = int(table.seq[row]), int(table.tenant[row])
        self._recorder.opened(request, seq, row, tenant, now, core.life.slot)

    def refused(self, core: Scheduler, request: Request, refusal: Refusal, now: int) -> None:
        """See `Witness`."""
        self._recorder.refused(request, refusal, now, core.life.slot)

    def decided(
        self, core: Scheduler, decision: Decision, records: Records, cutoffs: Records, now: int
    ) -> None:
        """See `Witness`."""
        quantum = core.quantum.tokens
        self._recorder.decided(decision, now, records, cutoffs, load_of(core), quantum_tokens=quantum)
        if self._recorder.due:
            self._recorder.keyframe(now, core.life.slot)

    def applied(self, core: Scheduler, result: StepResult, records: Records) -> None:
        """See `Witness`."""
        self._recorder.applied(result)
        self._recorder.noted(records, result.ended_ns)

    def ended(self, core: Scheduler, endings: Sequence[Ending]) -> None:
        """See `Witness`."""
        self._recorder.ended(endings, core.life.slot)
