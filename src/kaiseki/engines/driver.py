"""The driver: one owner of a scheduler and an engine, slot after slot.

Everything that touches the scheduler happens on the thread that calls `step`. Other threads put
requests and cancellations into an inbox, which is emptied before each decision, and read state under a
lock that is never held while the engine computes.

What goes wrong is kept as small as it is (B15). An error of one request's making (an id that is open
already, work that the engine can't open, an owner who can't be told) ends that request and no other. A
row whose chunk failed is tried again while the engine says that this may help, after a pause and not for
ever. An engine that fails on everything gets no new requests until a small one of our own has worked.
Whatever else is raised is a fault of the system: nothing that goes on can be trusted, so everything ends,
and health says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kaiseki.core.admission import Refusal
from kaiseki.core.decision import Decision, StepResult
from kaiseki.core.protocols import Engine
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.table import State
from kaiseki.engines.clock import Clock, MonotonicClock
from kaiseki.engines.inbox import Inbox, Post
from kaiseki.engines.recovery import Breaker, Recovery
from kaiseki.engines.reporting import report_endings, report_load, report_slot, report_step, write_keys
from kaiseki.engines.sessions import Session, Sessions
from kaiseki.engines.status import Health, state_of
from kaiseki.engines.updates import Sink, Update
from kaiseki.observe.explain import explain
from kaiseki.observe.history import History, Limits, Story
from kaiseki.observe.live import Live, Slots
from kaiseki.observe.metrics import Bins
from kaiseki.observe.recorder.flight import FlightRecorder, load_of
from kaiseki.observe.recorder.layout import Call
from kaiseki.observe.recorder.reading import Recording

_log = logging.getLogger(__name__)

Probe = Callable[[], tuple[Request, object]]
"""Makes a small request, and its work for the engine; its id is always the same."""


class Driver:
    """Runs a scheduler against an engine.

    Args:
        scheduler, engine: exclusively this driver's from now on.
        clock: the engine's notion of time.
        stall_s: without progress for so long, though there is work, health is not ok.
        bins: metrics; made when not given.
        after_slot: called on the driver's thread after each slot, to hand on what sinks collected.
        recovery: what is done about errors of the engine.
        probe: asks an engine that failed on everything whether it works again; without one, requests are
            taken whatever the engine does.
        recorder: is told everything; its owner closes it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        clock: Clock | None = None,
        stall_s: float = 60.0,
        bins: Bins | None = None,
        after_slot: Callable[[], None] | None = None,
        recovery: Recovery | None = None,
        probe: Probe | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.clock = clock or MonotonicClock()
        self.metrics = bins or Bins()
        self.slots = Slots()
        limits = Limits(scheduler.kv.total_blocks, scheduler.settings.watermark_ratio)
        self.history = History(limits=limits)
        self.recorder = recorder or FlightRecorder(None)
        self.after_slot = after_slot
        self._stall_s = stall_s
        self._recovery = recovery or Recovery()
        self._probe = probe
        self._breaker = Breaker(self._recovery)
        self._inbox = Inbox()
        self._sessions = Sessions(scheduler, engine, self.history, self.metrics, self.recorder)
        self._unkeyed: list[tuple[int, Story]] = []
        self._lock = threading.Lock()
        self._wake = self._inbox.changed
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._draining = False
        self._fault = ""
        self._ended = False
        self._progress_ns = self.clock.now_ns()
        self._candidate_ns = 0.0
        self._decided_ns = 0  # spent on decisions since the last result
        report_load(self.metrics, scheduler, 0)  # whoever looks before the first slot sees an empty pool

    # ------------------------------------------------------------------ from any thread

    def submit(self, request: Request, work: object, sink: Sink) -> None:
        """Ask for a request to be run. All news of it, a refusal too, comes through `sink`."""
        post = Post(lambda now: self._submit(request, work, sink, now), 1, request.prompt_tokens)
        self._post(post)

    def cancel(self, request_id: str) -> None:
        """Ask for a request to be ended; unknown ids are ignored."""
        self._post(Post(lambda now: self._cancel(request_id, now)))

    def break_off(self, error: Exception) -> None:
        """End everything for a fault noticed elsewhere, such as an engine that is gone while nothing runs."""

        def fail(now: int) -> None:
            if not self._ended:
                raise error

        self._inbox.put(Post(fail))  # in vain when it has ended already

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
    def resting_until_ns(self) -> int | None:
        """When the first of those that wait for another try gets it; None when nobody does."""
        return min(self._sessions.resting.values(), default=None)

    def backlog(self) -> tuple[int, int]:
        """How many requests wait, and their prompt tokens, with those that nobody has looked at yet."""
        requests, tokens = self._inbox.backlog()
        waiting = self.scheduler.waiting
        return requests + len(waiting), tokens + int(waiting.tokens)

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._draining

    def health(self) -> Health:
        """Whether progress is made; never blocks on the engine."""
        s = self.scheduler
        age = (self.clock.now_ns() - self._progress_ns) / 1e9 if self.busy else 0.0
        reason, code, retry_after_s = self._fault, "no_progress", None
        if not reason and age > self._stall_s:
            reason = f"no slot finished for {age:.0f} s with {len(self._sessions)} requests open"
        if not reason and self._closed:
            reason, code = self._breaker.reason, Reason.ENGINE_FAILING.label
            retry_after_s = self._breaker.retry_after_s
        ok = not reason
        where = (age, s.life.slot, s.table.running_count, self.backlog()[0])
        return Health(ok, reason, *where, "" if ok else code, retry_after_s)

    def snapshot(self) -> dict[str, Any]:
        """The state document: queues, tenants, KV, policy."""
        with self._lock:
            return state_of(self.scheduler, self._draining, self._inbox.backlog()[0])

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Why a request waited, was refused, was preempted; None for an unknown or long-forgotten id."""
        with self._lock:
            return explain(self.history, request_id, self.clock.now_ns())

    def live(self, since: int, tenant: str | None = None) -> dict[str, Any]:
        """What a live view shows: what ran after slot `since`, who runs, and who waits for what."""
        with self._lock:
            return Live(self.scheduler, self.history, self.slots, tenant).document(since, self.clock.now_ns())

    def recording(self) -> Recording | None:
        """A copy of what the flight recorder has kept so far, None without one. May be called at any time."""
        ring = self.recorder.ring
        return None if ring is None else Recording(ring.copy())

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
        if self.recorder.due:  # now, as the engine is busy
            with self._lock:
                self.recorder.keyframe(self.clock.now_ns(), self.scheduler.life.slot)
        if self.scheduler.in_flight:
            result = self.engine.collect()
            self._apply(result)
            self._progress_ns = self.clock.now_ns()
            decided = True
        report_load(self.metrics, self.scheduler, self.backlog()[0])
        self.metrics.load.engine_failing = self._closed
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
                if self.resting_until_ns is None:
                    raise RuntimeError(f"livelock: {self.snapshot()}")
                self.clock.advance_to(self.resting_until_ns)
        raise RuntimeError(f"still busy after {most_slots} slots: {self.snapshot()}")

    def _post(self, post: Post) -> None:
        if not self._inbox.put(post):  # nobody will empty the inbox: answer here and now
            with self._lock:
                post.action(self.clock.now_ns())

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.busy and self._until_probe_s() != 0.0:
                    self._progress_ns = self.clock.now_ns()
                    with self._wake:
                        self._wake.notify_all()
                        self._wake.wait_for(lambda: self._stopping or self.busy, self._until_probe_s())
                    continue
                if not self.step():
                    with self._wake:
                        self._wake.wait_for(lambda: self._stopping or bool(self._inbox), self._pause_s())
            self._end_all(Outcome.CANCELLED, Reason.DRAINING)
        except Exception as error:  # a fault of the system: nothing that goes on can be trusted
            _log.exception("the driver failed")
            self._fault = f"{type(error).__name__}: {error}"
            self._end_all(Outcome.FAILED, Reason.ENGINE_ERROR)
        with self._wake:
            self._wake.notify_all()

    @property
    def _closed(self) -> bool:
        """Whether no requests are taken since the engine fails on everything."""
        return self._probe is not None and self._breaker.open

    def _until_probe_s(self) -> float | None:
        """When the engine is to be asked whether it works again, from now; None for never."""
        wait_ns = self._breaker.until_probe_ns(self.clock.now_ns())
        return None if wait_ns is None or self._probe is None or self._draining else wait_ns / 1e9

    def _pause_s(self) -> float:
        """How long to wait when there are open requests but nothing to run now."""
        until = self.resting_until_ns
        if until is None or len(self._sessions.resting) < len(self._sessions):
            return 0.001  # blocks that are still in limbo, for example
        wait_s = max(0.0, (until - self.clock.now_ns()) / 1e9)
        probe_s = self._until_probe_s()
        return wait_s if probe_s is None else min(wait_s, probe_s)

    def _end_all(self, outcome: Outcome, reason: Reason) -> None:
        """Tell every owner. The core is left alone, since it may be what broke."""
        now = self.clock.now_ns()
        self._draining = self._ended = True
        self._inbox.close()
        for session in self._sessions.take_all():
            self._sessions.tell(session.sink, Update(session.request.id, now, outcome=outcome, reason=reason))
        with self._lock:
            while self._inbox:
                try:
                    self._inbox.empty(now)
                except Exception:
                    _log.exception("the driver has ended, and could not say so to everybody")
        if self.after_slot is not None:
            self.after_slot()

    def _decide(self) -> Decision:
        with self._lock:
            now = self.clock.now_ns()
            self._inbox.empty(now)
            self._ask_engine(now)
            if self._sessions.resting:
                self._wake_up(now)
            write_keys(self.scheduler, self._unkeyed)
            if not self._sessions:
                self._sessions.emit_endings(self.scheduler.take_endings(), {})
                self._note(now)
                return _nothing()
            limit = None
            if self._candidate_ns > 0:
                limit = max(1, int(self.scheduler.settings.timeout_ms * 1e6 / self._candidate_ns))
            decision = self.scheduler.decide(now, limit)
            spent = self.clock.now_ns() - now
            self._decided_ns += spent
            looked = max(1, min(self.scheduler.settings.window, len(self.scheduler.waiting)))
            self._candidate_ns += 0.1 * (spent / looked - self._candidate_ns)
            records, cutoffs = self.scheduler.trace.drain()
            self.history.slot(decision.slot, now, records, cutoffs)
            self.slots.decided(decision, self.scheduler.table.seq[decision.rows])
            self.recorder.decided(
                decision, now, records, cutoffs, load_of(self.scheduler), limit, spent,
                self.scheduler.quantum.tokens,
            )  # fmt: skip
            report_slot(self.metrics, self.scheduler, decision, spent, records, cutoffs)
            self._sessions.emit_endings(self.scheduler.take_endings(), {})
            return decision

    def _apply(self, result: StepResult) -> None:
        with self._lock:
            again = self._judge(result)
            begin = self.clock.now_ns()
            applied = self.scheduler.apply(result)
            spent = self._decided_ns + self.clock.now_ns() - begin
            self.scheduler.quantum.observe(spent, result.ended_ns - result.started_ns)
            self._decided_ns = 0
            self.recorder.applied(result, spent)
            self._rest(again, result.ended_ns)
            self.slots.stepped(result)
            self._note(result.ended_ns)  # no decision may follow
            endings = {e.row: e for e in self.scheduler.take_endings()}
            untold = self._sessions.emit_tokens(result, applied, endings)
            self._sessions.emit_endings(list(endings.values()), endings)
            report_step(self.metrics, applied, result.ended_ns - result.started_ns)
            report_endings(self.metrics, list(endings.values()))
            for row in untold:
                self._fail(row, Reason.CLIENT_GONE, result.ended_ns)

    def _note(self, now: int) -> None:
        """Take in what happened outside of decisions."""
        records = self.scheduler.trace.drain()[0]
        self.history.note(records)
        self.recorder.noted(records, now)

    def _judge(self, result: StepResult) -> list[int]:
        """Count failures; a request that has failed too often is not tried again.

        Returns:
            Rows that are.
        """
        if not result.failed.any():
            if result.rows.size:
                self._breaker.worked()
            return []
        # What was stopped or ended meanwhile says nothing.
        valid = self.scheduler.table.epoch[result.rows] == result.epochs
        hit, worked = valid & result.failed, bool((valid & ~result.failed).any())
        nobody = bool(hit.any()) and not worked
        if nobody:
            self._breaker.failed(result.message, result.ended_ns)
        elif worked:
            self._breaker.worked()
        again = []
        for i in np.flatnonzero(hit).tolist():
            session = self._sessions[int(result.rows[i])]
            session.failures += 1
            result.retryable[i] &= session.failures <= session.retries
            if result.retryable[i]:
                again.append(int(result.rows[i]))
            then = "it is tried again" if result.retryable[i] else "it ends"
            message = "request %s failed in slot %d, %s: %s"
            _log.error(message, session.request.id, result.slot, then, result.message)
        self.metrics.on_errors(len(again), int(hit.sum()) - len(again), nobody)
        return again

    def _rest(self, rows: list[int], now: int) -> None:
        """Keep rows that are to be tried again out of the queue for a while."""
        waits = [self._recovery.backoff_ns(self._sessions[row].failures) for row in rows]
        if any(waits):
            self._sessions.resting.update((row, now + wait) for row, wait in zip(rows, waits, strict=True))
            which = np.array(rows, np.int32)
            self.scheduler.life.back_off(which, np.array(waits, np.float64), now)
            self.recorder.called(Call.BACK_OFF, now, which, waits, slot=self.scheduler.life.slot)

    def _wake_up(self, now: int) -> None:
        """Queue rows whose pause is over."""
        due = [row for row, until in self._sessions.resting.items() if until <= now]
        if due:
            for row in due:
                del self._sessions.resting[row]
            rows = np.array(due, np.int32)
            self.scheduler.life.come_back(rows, now)
            self.recorder.called(Call.COME_BACK, now, rows, slot=self.scheduler.life.slot)

    def _ask_engine(self, now: int) -> None:
        """Let a request of our own try an engine that fails on everything, if it is time."""
        if self._probe is None or self._draining or self._breaker.until_probe_ns(now) != 0:
            return
        self._breaker.probed(now)
        request, work = self._probe()
        if request.id not in self.scheduler.life.ids:  # the last one may still be under way
            self._take(replace(request, arrival_ns=now), work, lambda update: None, 0, now)

    def _submit(self, request: Request, work: object, sink: Sink, now: int) -> None:
        if self._draining:
            self._refuse(request, Refusal(Reason.DRAINING, retry_after_s=5.0), sink, now)
        elif self._closed:
            refusal = Refusal(Reason.ENGINE_FAILING, retry_after_s=self._breaker.retry_after_s)
            self._refuse(request, refusal, sink, now)
        else:
            self._take(request, work, sink, self._recovery.max_retries, now)

    def _take(self, request: Request, work: object, sink: Sink, retries: int, now: int) -> None:
        """Hand a request to the scheduler and the engine."""
        s = self.scheduler
        before = s.table.open_rows
        try:
            refusal = s.submit(request, now)
        except Exception:
            if s.table.open_rows != before:
                raise  # half of it is in the core
            _log.exception("request %s could not be submitted", request.id)
            self._sessions.tell(sink, Update(request.id, now, outcome=Outcome.FAILED))
            return
        if refusal is not None:
            self._refuse(request, refusal, sink, now)
            return
        row = s.life.ids[request.id]
        session = Session(request, sink, retries)
        self._sessions.add(row, session)
        story = Story(request, int(s.table.seq[row]), int(s.table.tenant[row]))
        self.recorder.opened(request, story.seq, row, story.tenant, now, s.life.slot)
        self.history.opened(story)
        if s.table.state[row] == State.WAITING:  # a fork that is held back has no key yet
            self._unkeyed.append((row, story))
        self.metrics.set_names(s.fairness.names, [c.name for c in s.life.classes])
        try:
            self.engine.open(row, work)
            session.opened = True
        except Exception:
            _log.exception("request %s could not be opened by the engine", request.id)
            self._fail(row, Reason.ENGINE_ERROR, now)

    def _refuse(self, request: Request, refusal: Refusal, sink: Sink, now: int) -> None:
        story = Story(request, -1, refusal=refusal.reason, numbers=refusal.numbers, refused_ns=now)
        self.history.opened(story)
        self.recorder.refused(request, refusal, now, self.scheduler.life.slot)
        self.metrics.count_refusal(request.tenant, request.cls.name, refusal.reason)
        update = Update(
            request.id,
            now,
            outcome=Outcome.REFUSED,
            reason=refusal.reason,
            numbers=refusal.numbers,
            retry_after_s=refusal.retry_after_s,
        )
        self._sessions.tell(sink, update)

    def _cancel(self, request_id: str, now: int) -> None:
        if self._ended:
            return  # everybody has been told already
        if self.scheduler.cancel(request_id, now):
            self.recorder.called(Call.CANCEL, now, text=request_id, slot=self.scheduler.life.slot)
        # Told at once: the next request in the inbox may be given the row that this one had.
        self._sessions.emit_endings(self.scheduler.take_endings(), {})

    def _fail(self, row: int, reason: Reason, now: int) -> None:
        """End one request for what it did here, outside of a step."""
        if row in self._sessions:
            self.scheduler.life.end(row, Outcome.FAILED, reason, now)
            which = np.array([row], np.int32)
            self.recorder.called(Call.FAIL, now, which, [reason], slot=self.scheduler.life.slot)
            self._sessions.emit_endings(self.scheduler.take_endings(), {})


def _nothing() -> Decision:
    none = np.empty(0, np.int32)
    return Decision(0, none, none, none, np.empty(0, np.bool_), none)
