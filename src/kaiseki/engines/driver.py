"""The driver: one owner of a scheduler and an engine, slot after slot.

Everything that touches the scheduler happens on the thread that calls `step`. Other threads put
requests and cancellations into an inbox, which is emptied before each decision, and read state under a
lock that is never held while the engine computes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kaiseki.core.admission import Refusal
from kaiseki.core.applying import Applied
from kaiseki.core.decision import Decision, StepResult
from kaiseki.core.lifecycle import Ending
from kaiseki.core.protocols import Engine
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.engines.clock import Clock, MonotonicClock
from kaiseki.engines.reporting import report_endings, report_slot, report_step
from kaiseki.engines.updates import Sink, Update
from kaiseki.observe.explain import explain
from kaiseki.observe.history import History, Story
from kaiseki.observe.metrics import Bins

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the driver makes progress.

    Attributes:
        ok: false when it does not.
        reason: why, in words; empty when ok.
        last_progress_age_s: since a slot was finished, or nothing was left to do.
        slot, running, waiting: where it stands.
    """

    ok: bool
    reason: str
    last_progress_age_s: float
    slot: int
    running: int
    waiting: int


@dataclass(slots=True)
class _Session:
    request: Request
    sink: Sink
    cached: int = -1


class Driver:
    """Runs a scheduler against an engine.

    Args:
        scheduler, engine: exclusively this driver's from now on.
        clock: the engine's notion of time.
        stall_s: without progress for so long, though there is work, health is not ok.
        bins: metrics; made when not given.
        after_slot: called on the driver's thread after each slot, to hand on what sinks collected.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        clock: Clock | None = None,
        stall_s: float = 60.0,
        bins: Bins | None = None,
        after_slot: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.clock = clock or MonotonicClock()
        self.metrics = bins or Bins()
        self.history = History()
        self.after_slot = after_slot
        self._stall_s = stall_s
        self._inbox: deque[Callable[[int], None]] = deque()
        self._sessions: dict[int, _Session] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._draining = False
        self._fault = ""
        self._ended = False
        self._progress_ns = self.clock.now_ns()
        self._candidate_ns = 0.0

    # ------------------------------------------------------------------ from any thread

    def submit(self, request: Request, work: object, sink: Sink) -> None:
        """Ask for a request to be run. All news of it, a refusal too, comes through `sink`."""
        self._post(lambda now: self._submit(request, work, sink, now))

    def cancel(self, request_id: str) -> None:
        """Ask for a request to be ended; unknown ids are ignored."""
        self._post(lambda now: self._cancel(request_id, now))

    def start(self) -> None:
        """Run on a thread of its own until `stop`."""
        self._thread = threading.Thread(target=self._run, name="kaiseki-driver", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait until what is open has ended. False when some was left after the time."""
        self._draining = True
        with self._wake:
            self._wake.notify_all()
            return self._wake.wait_for(lambda: not self.busy or bool(self._fault), timeout_s)

    def stop(self) -> None:
        """End the thread after the current slot; what is still open is cancelled."""
        self._stopping = True
        with self._wake:
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def busy(self) -> bool:
        """Whether there is anything to do: open requests, news for them, or a step not collected."""
        return bool(self._sessions or self._inbox or self.scheduler.in_flight)

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._draining

    def health(self) -> Health:
        """Whether progress is made; never blocks on the engine."""
        s = self.scheduler
        age = (self.clock.now_ns() - self._progress_ns) / 1e9 if self.busy else 0.0
        reason = self._fault
        if not reason and age > self._stall_s:
            reason = f"no slot finished for {age:.0f} s with {len(self._sessions)} requests open"
        return Health(not reason, reason, age, s.life.slot, s.table.running_count, len(s.waiting))

    def snapshot(self) -> dict[str, Any]:
        """The state document: queues, tenants, KV, policy."""
        s = self.scheduler
        with self._lock:
            f, t = s.fairness, s.table
            running = np.bincount(t.tenant[t.running_rows()], minlength=len(f.names))
            return {
                "slot": s.life.slot,
                "policy": s.policy.name,
                "running": t.running_count,
                "waiting": len(s.waiting),
                "open": t.open_rows,
                "draining": self._draining,
                "tenants": {
                    name: {
                        "service_s": f.counter[i] / 1e9,
                        "weight": f.weight[i],
                        "running": int(running[i]),
                        "waiting": s.waiting.count(i),
                    }
                    for i, name in enumerate(f.names)
                },
                "kv": {
                    "total_blocks": s.kv.total_blocks,
                    "free_blocks": s.kv.free_blocks(),
                    "live_blocks": s.kv.live_blocks(),
                    "block_tokens": s.kv.block_tokens,
                },
            }

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Why a request waited, was refused, was preempted; None for an unknown or long-forgotten id."""
        with self._lock:
            return explain(self.history, request_id, self.clock.now_ns())

    def recent(self, limit: int, tenant: str | None = None) -> list[dict[str, Any]]:
        """The newest requests, of one tenant or of all."""
        with self._lock:
            return self.history.recent(limit, tenant)

    # ------------------------------------------------------------------ on the driver's thread

    def step(self) -> bool:
        """One slot: decide as long as the engine takes decisions, then collect one result.

        Returns whether anything was executed or collected.
        """
        decided = False
        while self.scheduler.in_flight <= self.engine.capabilities.depth:
            decision = self._decide()
            if decision.empty:
                break
            self.engine.execute(decision)
            decided = True
        if self.scheduler.in_flight:
            result = self.engine.collect()
            self._apply(result)
            self._progress_ns = self.clock.now_ns()
            decided = True
        if self.after_slot is not None:
            self.after_slot()
        return decided

    def run_until_idle(self, most_slots: int = 1_000_000) -> int:
        """Step until nothing is open. Returns the number of slots; for tests and simulation.

        Raises:
            RuntimeError: work is left but nothing could be done, or it took more slots than allowed.
        """
        for slots in range(most_slots):
            if not self.busy:
                return slots
            if not self.step() and self.busy:
                raise RuntimeError(f"livelock: {self.snapshot()}")
        raise RuntimeError(f"still busy after {most_slots} slots: {self.snapshot()}")

    def _post(self, action: Callable[[int], None]) -> None:
        with self._wake:
            ended = self._ended
            if not ended:
                self._inbox.append(action)
                self._wake.notify_all()
        if ended:  # nobody will empty the inbox: answer here and now
            with self._lock:
                action(self.clock.now_ns())

    def _empty_inbox(self, now: int) -> None:
        while self._inbox:
            self._inbox.popleft()(now)

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.busy:
                    self._progress_ns = self.clock.now_ns()
                    with self._wake:
                        self._wake.notify_all()
                        self._wake.wait_for(lambda: self._stopping or self.busy)
                    continue
                if not self.step():
                    # Open requests but nothing to run now, such as blocks that are still in limbo.
                    with self._wake:
                        self._wake.wait(0.001)
            self._end_all(Outcome.CANCELLED, Reason.DRAINING)
        except Exception as error:  # a fault of the system: nothing that goes on can be trusted
            _log.exception("the driver failed")
            self._fault = f"{type(error).__name__}: {error}"
            self._end_all(Outcome.FAILED, Reason.ENGINE_ERROR)
        with self._wake:
            self._wake.notify_all()

    def _end_all(self, outcome: Outcome, reason: Reason) -> None:
        now = self.clock.now_ns()
        self._draining = True
        with self._wake:
            self._ended = True
        with self._lock:
            self._empty_inbox(now)
        for row, session in list(self._sessions.items()):
            del self._sessions[row]
            session.sink(Update(session.request.id, now, outcome=outcome, reason=reason))
        if self.after_slot is not None:
            self.after_slot()

    def _decide(self) -> Decision:
        with self._lock:
            now = self.clock.now_ns()
            self._empty_inbox(now)
            if not self._sessions:
                self._emit_endings(self.scheduler.take_endings(), {})
                self.history.note(self.scheduler.trace.drain()[0])
                return _nothing()
            limit = None
            if self._candidate_ns > 0:
                limit = max(1, int(self.scheduler.settings.timeout_ms * 1e6 / self._candidate_ns))
            decision = self.scheduler.decide(now, limit)
            spent = self.clock.now_ns() - now
            looked = max(1, min(self.scheduler.settings.window, len(self.scheduler.waiting)))
            self._candidate_ns += 0.1 * (spent / looked - self._candidate_ns)
            records, cutoffs = self.scheduler.trace.drain()
            self.history.slot(decision.slot, now, records, cutoffs)
            report_slot(self.metrics, self.scheduler, decision, spent, records, cutoffs)
            self._emit_endings(self.scheduler.take_endings(), {})
            return decision

    def _apply(self, result: StepResult) -> None:
        with self._lock:
            applied = self.scheduler.apply(result)
            self.history.note(self.scheduler.trace.drain()[0])  # no decision may follow
            endings = {e.row: e for e in self.scheduler.take_endings()}
            self._emit_tokens(result, applied, endings)
            self._emit_endings(list(endings.values()), endings)
            report_step(self.metrics, applied, result.ended_ns - result.started_ns)
            report_endings(self.metrics, list(endings.values()))
        if result.message:
            _log.error("slot %d: %s", result.slot, result.message)

    def _submit(self, request: Request, work: object, sink: Sink, now: int) -> None:
        refusal = Refusal(Reason.DRAINING, retry_after_s=5.0) if self._draining else None
        refusal = refusal or self.scheduler.submit(request, now)
        if refusal is not None:
            story = Story(request, -1, refusal=refusal.reason, numbers=refusal.numbers, refused_ns=now)
            self.history.opened(story)
            self.metrics.count_refusal(request.tenant, request.cls.name, refusal.reason)
            sink(
                Update(
                    request.id,
                    now,
                    outcome=Outcome.REFUSED,
                    reason=refusal.reason,
                    numbers=refusal.numbers,
                    retry_after_s=refusal.retry_after_s,
                )
            )
            return
        s = self.scheduler
        row = s.life.ids[request.id]
        self.engine.open(row, work)
        self._sessions[row] = _Session(request, sink)
        key = float(s.waiting.keys(np.array([row], np.int32))[0]) if row in s.waiting else 0.0
        self.history.opened(Story(request, int(s.table.seq[row]), int(s.table.tenant[row]), key))
        self.metrics.set_names(s.fairness.names, [c.name for c in s.life.classes])

    def _cancel(self, request_id: str, now: int) -> None:
        self.scheduler.cancel(request_id, now)
        # Told at once: the next request in the inbox may be given the row that this one had.
        self._emit_endings(self.scheduler.take_endings(), {})

    def _emit_tokens(self, result: StepResult, applied: Applied, endings: dict[int, Ending]) -> None:
        """Hand each row's new tokens to its sink, with its ending when this was the last of it."""
        upto = np.cumsum(result.new_tokens)
        for i in np.flatnonzero(applied.emitted):
            row = int(result.rows[i])
            session = self._sessions[row]
            ids = result.token_ids[upto[i] - result.new_tokens[i] : upto[i]]
            if session.cached < 0:
                ending = endings.get(row)
                session.cached = ending.cached if ending else int(self.scheduler.table.cached[row])
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
            session.sink(update)

    def _emit_endings(self, endings: list[Ending], told: dict[int, Ending]) -> None:
        """Tell sinks about requests that ended without a last token, and forget all that ended."""
        for ending in endings:
            self.history.ended(ending)
            session = self._sessions.pop(ending.row)
            self.engine.close(ending.row)
            if told and ending.outcome == Outcome.COMPLETED:
                continue
            update = Update(ending.request_id, ending.ended_ns)
            self._close(update, ending)
            session.sink(update)
        if endings and not told:
            report_endings(self.metrics, endings)

    def _close(self, update: Update, ending: Ending) -> None:
        update.outcome, update.finish, update.reason = ending.outcome, ending.finish, ending.reason
        update.demoted = ending.demoted
        if ending.outcome == Outcome.EXPIRED:
            update.retry_after_s = self.scheduler.drain_s()


def _nothing() -> Decision:
    none = np.empty(0, np.int32)
    return Decision(0, none, none, none, np.empty(0, np.bool_), none)
