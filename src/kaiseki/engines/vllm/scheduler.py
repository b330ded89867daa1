"""The class for `--scheduler-cls`: vLLM's asynchronous scheduler with our core in front of it.

Before vLLM's own `schedule` the core decides; vLLM then finds, in its waiting queue, only those that the
core admits, and gives each request at most the chunk that the core grants. Afterwards the core is told
what was done. So block management, connectors, speculation, adapters, multimodal inputs and pauses run in
vLLM's code as ever, and one step costs one exchange, however many requests there are.

Should the two ever disagree on what runs, Kaiseki steps aside with an error in the log, and vLLM goes on
in its own order; no request is lost.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, NamedTuple

from kaiseki.core.admission import Refusal
from kaiseki.core.decision import Decision
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.scheduler import Scheduler
from kaiseki.cost.online import OnlineLinear
from kaiseki.engines.clock import Clock, MonotonicClock
from kaiseki.engines.vllm import adapter, board
from kaiseki.engines.vllm.asked import Asked, key_of
from kaiseki.engines.vllm.board import Board, Mode
from kaiseki.engines.vllm.books import Books, Disagreement
from kaiseki.engines.vllm.configured import Configured
from kaiseki.engines.vllm.offer import Offer
from kaiseki.engines.vllm.prior import step_prior
from kaiseki.engines.vllm.spare import spare_calls
from kaiseki.engines.vllm.witness import Recorded, Witness
from kaiseki.observe.recorder.flight import FlightRecorder, facts_of

_log = logging.getLogger(__name__)

_LOOK_AT_FILE_NS = 1_000_000_000
"""How often the settings' file is looked at."""


class Flight(NamedTuple):
    """A step whose result has not come: its decision, when it began, and how long deciding took, ns."""

    decision: Decision | None
    began_ns: int
    spent_ns: int


class KaisekiScheduler(adapter.AsyncScheduler):  # type: ignore[misc]
    """See the module. Arguments are vLLM's own.

    Raises:
        UnsupportedVersion: this vLLM is not one that Kaiseki was tested with.
        ConfigError: the settings have problems.
    """

    _clock: Clock = MonotonicClock()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        adapter.check_version()
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        self._configured = Configured(config.additional_config)
        self._asked = Asked(self._configured.settings, self.max_model_len)
        rank = config.parallel_config.data_parallel_index
        self.board = Board(board.folder(config.instance_id) / f"rank-{rank}", create=True)
        prior = step_prior(config.model_config, config.parallel_config.tensor_parallel_size, adapter.device())
        self._cost = OnlineLinear(prior)
        self._books: Books | None = None
        self._mode = Mode.VLLM
        self._async = bool(self.scheduler_config.async_scheduling)
        self._caps: dict[str, int] = {}
        self._flights: deque[Flight] = deque()
        self._arrived: list[tuple[Any, int]] = []
        self._blocked: dict[str, Any] = {}
        self._leaving: set[str] = set()
        self._gone: list[Any] = []
        self._surprises: list[Any] = []
        self._stopping = False
        self._ended_ns = self._looked_ns = self._clock.now_ns()
        if adapter.schedules_tokens(self):
            spare_calls(self.kv_cache_manager)
            self._switch(Mode[self._configured.settings.vllm.mode.upper()])
        else:
            _log.warning("Kaiseki schedules text generation; this model runs in vLLM's own order")

    # ------------------------------------------------------------------ who decides

    @property
    def mode(self) -> Mode:
        """Who decides."""
        return self._mode

    def _obey(self, now: int) -> None:
        """Take in a change of the settings, or what an API server asks for."""
        wanted = self.board.read("wanted")
        if now - self._looked_ns > _LOOK_AT_FILE_NS:
            self._looked_ns = now
            settings = self._configured.changed()
            if settings is not None:
                _log.info("settings read again: %s", self._configured.path)
                self._asked.reload(settings)
                if self._books is not None:
                    self._books.set_shares(settings)
                wanted = Mode[settings.vllm.mode.upper()]
        if wanted >= 0:
            self.board.write(wanted=-1)
            if wanted != self._mode and adapter.schedules_tokens(self):
                self._switch(Mode(wanted))

    def _switch(self, mode: Mode) -> None:
        """Let somebody else decide from the next step on."""
        if mode is Mode.VLLM:
            self._books = None
            self._leaving.clear()
            self._blocked.clear()
        elif self._books is None:
            self._open_books()
        self._set_queues(own=mode is Mode.KAISEKI)
        self._mode = mode
        self.board.write(mode=int(mode))
        _log.info("who decides: %s", mode.name.lower())

    def _open_books(self) -> None:
        """Begin with all requests waiting; those that run are preempted, and computed again."""
        self._books = Books(self, self._configured.settings, self._cost, self._stop, self._witness_of)
        limits = self._books.core.settings
        kv = self._books.kv
        self.board.write(
            max_waiting=limits.max_waiting,
            max_waiting_tokens=limits.max_waiting_tokens,
            total_blocks=kv.total_blocks,
            block_tokens=kv.block_tokens,
        )
        for request in list(self.running):
            self._stop(request)
        self._flights = deque(flight._replace(decision=None) for flight in self._flights)
        waiting = [*self.kv_holding_waiting, *self.waiting]
        self._arrived = [(request, self._arrival_ns(request)) for request in waiting]

    def _witness_of(self, core: Scheduler) -> Witness:
        """A recorder, where the settings name a folder."""
        wanted = self._configured.settings.recorder
        if wanted.folder is None:
            return Witness()
        config = self.vllm_config
        about = {"engine": "vllm", "model": str(config.model_config.model), **facts_of(core)}
        name = f"rank-{config.parallel_config.data_parallel_index}"
        now = self._clock.now_ns()
        # Without the core's state, in which vLLM's objects are: it explains, and cannot be replayed.
        return Recorded(FlightRecorder.open(wanted.folder, now, wanted.size_mb, about, name=name))

    def _set_queues(self, own: bool) -> None:
        """Queues that offer what the core chose, or vLLM's own in their own order."""
        self._caps = {}
        for name in ("waiting", "kv_holding_waiting"):
            requests = sorted(getattr(self, name), key=adapter.by_arrival)
            queue = Offer() if own else adapter.create_request_queue(self.policy)
            for request in requests:
                queue.add_request(request)
            setattr(self, name, queue)
        if not own:
            self.running.sort(key=adapter.by_arrival)

    def _step_aside(self, why: Exception) -> None:
        _log.error("Kaiseki steps aside, and vLLM goes on in its own order: %s", why)
        self._switch(Mode.VLLM)

    # ------------------------------------------------------------------ what vLLM calls

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """One step; see the module."""
        now = self._clock.now_ns()
        self._obey(now)
        if self._books is None:
            output = super().schedule(throttle_prefills)
            self._flights.append(Flight(None, now, 0))
            return output
        self._take_arrivals(self._books, now)
        if self._mode is Mode.KAISEKI and adapter.unpaused(self):
            return self._decided(self._books, throttle_prefills, now)
        return self._followed(self._books, throttle_prefills, now)

    def _decided(self, books: Books, throttle_prefills: bool, now: int) -> Any:
        """The core decides."""
        plan = books.core.plan(now)
        self._drop_lost(books)
        layout = books.lay_out(plan)
        self._caps = layout.caps
        if layout.order is not None:
            among = set(map(id, layout.order))
            self.running[:] = layout.order + [r for r in self.running if id(r) not in among]
        self._offer(layout.admitted)
        planned_ns = self._clock.now_ns()
        output = super().schedule(throttle_prefills)
        begun_ns = self._clock.now_ns()
        self._offer([])
        decision = None
        try:
            self._tell_surprises(books, begun_ns)
            decision = books.settle(plan, layout, output, now)
            aside = [r for r in layout.admitted if self._is_blocked_waiting_status(r.status)]
            if aside:
                books.put_aside(aside, begun_ns)
                self._blocked.update((r.request_id, r) for r in aside)
            self._check(books)
        except Disagreement as error:
            self._step_aside(error)
        spent = planned_ns - now + self._clock.now_ns() - begun_ns
        self._flights.append(Flight(decision, begun_ns, spent))
        return output

    def _followed(self, books: Books, throttle_prefills: bool, now: int) -> Any:
        """Here vLLM decides, and the core is told. In shadow mode it first says what it would do."""
        shadow = self._mode is Mode.SHADOW
        foreseen = books.foresee(now) if shadow else []
        if not shadow:
            self._caps = {}
        before = {r.request_id for r in self.running}
        output = super().schedule(throttle_prefills)
        begun_ns = self._clock.now_ns()
        decision = None
        try:
            self._tell_surprises(books, begun_ns)
            decision = books.follow(output, now)
            self._check(books)
        except Disagreement as error:
            self._step_aside(error)
        self._flights.append(Flight(decision, begun_ns, 0))
        if shadow:
            admitted = [i for i in output.num_scheduled_tokens if i not in before]
            self.board.write(differing=self.board.read("differing") + (admitted != foreseen))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """A step's result: vLLM takes it in, then the core."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        flight, books = self._flights.popleft(), self._books
        now = self._clock.now_ns()
        if books is not None:
            self._tell_surprises(books, now)
        finished = [request for request in self._gone if adapter.completed(request)]
        self._gone.clear()
        if books is not None:
            if flight.decision is not None and flight.decision.rows.size:
                started = max(flight.began_ns, self._ended_ns)
                books.apply(flight.decision, model_runner_output, finished, started, now)
                spent = flight.spent_ns + self._clock.now_ns() - now
                books.core.quantum.observe(spent, now - started)
            for request in finished:
                books.end(
                    request, Outcome.COMPLETED, Reason.NONE, now
                )  # also those that ended while preempted
            self._publish(books, now)
        self._ended_ns = now
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """A client left, or an error ended requests."""
        ended = super().finish_requests(request_ids, finished_status)
        now = self._clock.now_ns()
        for request in ended:
            outcome, reason = Outcome.FAILED, Reason.ENGINE_ERROR
            if adapter.aborted(request):
                outcome, reason = Outcome.CANCELLED, Reason.CLIENT_GONE
            if self._books is not None:
                self._books.end(request, outcome, reason, now)
        return ended

    # ------------------------------------------------------------------ hooks in vLLM's own code

    def _enqueue_waiting_request(self, request: Any) -> None:
        super()._enqueue_waiting_request(request)
        if self._books is not None:
            self._arrived.append((request, self._arrival_ns(request)))

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        # What is in flight for a preempted request is dropped, as in the core, and computed again: so it may
        # go on at once. vLLM's other way, to wait for it and keep it, gives the same tokens.
        drop = drop_stale_output or self._books is not None
        super()._preempt_request(request, timestamp, drop_stale_output=drop)
        if self._books is not None and not self._stopping:
            self._surprises.append(request)

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        self._gone.append(request)
        self._leaving.discard(request.request_id)
        self._blocked.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        # The one place through which vLLM sends the size of every chunk.
        cap = self._caps.get(request.request_id)
        if cap is not None and cap < num_new_tokens:
            num_new_tokens = cap
        if not self.num_prefill_lookahead:
            return num_new_tokens
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # Where vLLM runs synchronously, `AsyncScheduler` must not leave placeholders for tokens to come.
        base = adapter.AsyncScheduler if self._async else adapter.Scheduler
        base._update_after_schedule(self, scheduler_output)

    def _update_request_with_output(self, request: Any, new_token_ids: Any, is_stale: bool = False) -> Any:
        base = adapter.AsyncScheduler if self._async else adapter.Scheduler
        return base._update_request_with_output(self, request, new_token_ids, is_stale)

    # ------------------------------------------------------------------ between the two

    def _stop(self, request: Any) -> None:
        """Preempt a request, for the core."""
        self._stopping = True
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())
        self._stopping = False

    def _arrival_ns(self, request: Any) -> int:
        """When the API server got the request, on this process's clock."""
        return self._clock.now_ns() - adapter.waited_ns(request)

    def _offer(self, requests: list[Any]) -> None:
        holding = [r for r in requests if self._holds_kv_blocks(r)]
        self.kv_holding_waiting.offer(holding)
        self.waiting.offer([r for r in requests if r not in holding] if holding else requests)

    def _tell_surprises(self, books: Books, now: int) -> None:
        """Requests that vLLM preempted by itself."""
        if self._surprises:
            books.stopped(self._surprises, now)
            self._surprises.clear()

    def _take_arrivals(self, books: Books, now: int) -> None:
        """Submit what has come since the last step, and what no longer waits for something else."""
        self._tell_surprises(books, now)
        for request, arrival_ns in self._arrived:
            if request.is_finished():
                continue
            books.end(request, Outcome.COMPLETED, Reason.NONE, now)  # a session that has more to say
            if self._is_blocked_waiting_status(request.status):
                self._blocked[request.request_id] = request
            else:
                self._submit(books, request, arrival_ns, now)
        self._arrived.clear()
        for request_id, request in list(self._blocked.items()):
            if self._handle_blocked_waiting_request(request):
                del self._blocked[request_id]
                if books.row(request) is not None:
                    books.come_back(request, now)
                else:
                    self._submit(books, request, self._arrival_ns(request), now)

    def _submit(self, books: Books, request: Any, arrival_ns: int, now: int) -> None:
        asked = self._asked.request(request, arrival_ns)
        if self._mode is not Mode.KAISEKI:
            books.watch(asked, request, now)
            return
        refusal = books.submit(asked, request, now)
        if refusal is not None:
            self._dismiss(request, Outcome.REFUSED, refusal)

    def _drop_lost(self, books: Books) -> None:
        """Requests that the core has given up: their clients are told with the next result."""
        for ending in books.lost():
            request = self.requests[ending.request_id]
            self._dismiss(request, ending.outcome, Refusal(ending.reason))

    def _dismiss(self, request: Any, outcome: Outcome, refusal: Refusal) -> None:
        """Have vLLM end a request that the core does not run, and say on the board why."""
        self.board.ended(key_of(request), outcome, refusal)
        self._leaving.add(request.request_id)
        self.grammar_compile_error_reqs.add(request.request_id)  # ends with an error in `update_from_output`

    def _check(self, books: Books) -> None:
        apart = len(self._leaving) + sum(books.row(r) is None for r in self._blocked.values())
        books.check(self.running, adapter.open_requests(self) - apart)

    def _publish(self, books: Books, now: int) -> None:
        core = books.core
        self.board.write(
            slot=core.life.slot,
            beat_ns=now,
            running=core.table.running_count,
            waiting=len(core.waiting),
            waiting_tokens=core.waiting.tokens,
            free_blocks=books.kv.free_blocks(),
            drain_s=core.drain_s(),
        )
