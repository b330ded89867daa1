"""Whom to tell what: the owners of open requests, and the news that they get."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kaiseki.core.applying import Applied
from kaiseki.core.decision import StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.protocols import Engine
from kaiseki.core.reasons import Outcome
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.engines.reporting import report_endings
from kaiseki.engines.updates import Sink, Update
from kaiseki.observe.history import History
from kaiseki.observe.metrics import Bins
from kaiseki.observe.recorder.flight import FlightRecorder

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Session:
    """An open request, and whom to tell. `opened`: the engine knows it.

    `failures`: of its chunks; `retries`: how many of them it may survive.
    """

    request: Request
    sink: Sink
    retries: int
    cached: int = -1
    opened: bool = False
    failures: int = 0


class Sessions:
    """Open requests by row. News of them goes out from here, and who can't be told is its own trouble.

    Args:
        scheduler, engine, history, metrics, recorder: of the driver.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        history: History,
        metrics: Bins,
        recorder: FlightRecorder,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._history = history
        self._metrics = metrics
        self._recorder = recorder
        self._open: dict[int, Session] = {}
        self.resting: dict[int, int] = {}
        """Rows that back off, and until when."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, row: int) -> bool:
        return row in self._open

    def __getitem__(self, row: int) -> Session:
        return self._open[row]

    def add(self, row: int, session: Session) -> None:
        """A request has this row from now on."""
        self._open[row] = session

    def take_all(self) -> Iterator[Session]:
        """Forget all, one by one."""
        while self._open:
            yield self._open.pop(next(iter(self._open)))

    def tell(self, sink: Sink, update: Update) -> bool:
        """Hand an update to its owner. False when that went wrong, which is the owner's trouble alone."""
        try:
            sink(update)
        except Exception:
            _log.exception("request %s: its owner could not be told", update.request_id)
            return False
        return True

    def emit_tokens(self, result: StepResult, applied: Applied, endings: dict[int, Ending]) -> list[int]:
        """Hand each row's new tokens to its sink, with its ending when this was the last of it.

        Returns:
            Rows whose owners could not be told.
        """
        untold = []
        upto = np.cumsum(result.new_tokens)
        for i in np.flatnonzero(applied.emitted):
            row = int(result.rows[i])
            session = self._open[row]
            ids = result.token_ids[upto[i] - result.new_tokens[i] : upto[i]]
            if session.cached < 0:
                ending = endings.get(row)
                session.cached = ending.cached if ending else int(self._scheduler.table.cached[row])
            update = Update(
                session.request.id,
                result.ended_ns,
                token_ids=tuple(ids.tolist()),
                payload=result.payloads[i] if result.payloads is not None else None,
                cached_tokens=session.cached,
            )
            ending = endings.get(row)
            if ending is not None:
                self._close(update, ending)
            if not self.tell(session.sink, update):
                untold.append(row)
        return untold

    def emit_endings(self, endings: list[Ending], told: dict[int, Ending]) -> None:
        """Tell sinks about requests that ended without a last token, and forget all that ended."""
        self._recorder.ended(endings, self._scheduler.life.slot)
        for ending in endings:
            self._history.ended(ending)
            session = self._open.pop(ending.row)
            self.resting.pop(ending.row, None)
            self._close_row(ending.row, session)
            if told and ending.outcome == Outcome.COMPLETED:
                continue
            update = Update(ending.request_id, ending.ended_ns)
            self._close(update, ending)
            if ending.outcome == Outcome.FAILED and session.failures:
                update.numbers = {"attempts": session.failures}
            self.tell(session.sink, update)
        if endings and not told:
            report_endings(self._metrics, endings)

    def _close_row(self, row: int, session: Session) -> None:
        if not session.opened:
            return
        try:
            self._engine.close(row)
        except Exception:  # it has ended all the same
            _log.exception("request %s could not be closed by the engine", session.request.id)

    def _close(self, update: Update, ending: Ending) -> None:
        update.outcome, update.finish, update.reason = ending.outcome, ending.finish, ending.reason
        update.demoted = ending.demoted
        if ending.outcome == Outcome.EXPIRED:
            update.retry_after_s = self._scheduler.drain_s()
