"""One simulated replica: a scheduler, its KV pool, and an engine that only takes time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kaiseki.core.admission import Refusal, never_runs
from kaiseki.core.decision import I32
from kaiseki.core.endings import Ending
from kaiseki.core.policy import Policy
from kaiseki.core.protocols import F_CONTEXT, F_DECODES, F_SLOT, N_FEATURES
from kaiseki.core.reasons import Outcome
from kaiseki.core.requests import Request, ServiceClass
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import Records, State
from kaiseki.cost.profiled import Spread
from kaiseki.cost.transfers import lora_load_ns, swap_ns
from kaiseki.engines.clock import VirtualClock
from kaiseki.memory.pool import BlockPool
from kaiseki.observe.recorder.flight import FlightRecorder, load_of
from kaiseki.observe.recorder.layout import Call
from kaiseki.sim.cluster import Replica as Description
from kaiseki.sim.engine import SimulatedEngine, Work
from kaiseki.sim.lives import Left
from kaiseki.sim.routers import Load

RETRY_NS = 1_000_000
"""When nothing could be granted though requests are open, the next look comes so much later."""


SENDING_RETRY_NS = 20_000_000
"""The same where KV waits to be sent: the room that this gives brings a look of its own."""


FIRST_GUESS_TOKENS = 128.0
"""How long outputs are taken to be before any has ended."""
RECENT_OUTPUTS = 100
"""Over about so many the mean length of outputs is taken."""


@dataclass(frozen=True, slots=True)
class Happened:
    """What a step brought: TOKEN[m] of waits, and requests that ended."""

    tokens: Records
    endings: list[Ending]


class SimReplica:
    """Wraps what a server's driver does around `decide` and `apply`, without the clients.

    Args:
        description: model, cards and room.
        policy: of the scheduler.
        settings: of the scheduler; batch size and step length are the description's.
        classes: in the order in which figures are kept.
        weights: share of each tenant, in that order.
        clock: of the whole simulation.
        seed: of how much longer than predicted steps take, where a profile says so.

    Attributes:
        up: it takes requests.
        failed: it does not, and will not before it recovers.
    """

    def __init__(
        self,
        description: Description,
        policy: Policy,
        settings: SchedulerSettings,
        classes: Sequence[ServiceClass],
        weights: dict[str, float],
        clock: VirtualClock,
        seed: int = 1,
    ) -> None:
        pool, deployment, profile = description.pool, description.deployment, description.profile
        self.description = description
        swap = round(swap_ns(deployment, pool.block_tokens)) if pool.host_kv_blocks else 0
        self.engine = SimulatedEngine(
            description.timing,
            clock,
            max_step_tokens=pool.max_step_tokens,
            ahead=profile.pipeline_depth if profile is not None else 0,
            spread=Spread(profile, seed) if profile is not None else None,
            adapter_slots=pool.lora_slots,
            adapter_load_ns=round(lora_load_ns(deployment, pool.lora_rank)) if pool.lora_slots else 0,
            swap_block_ns=swap,
        )
        self.up = not description.spare
        self.failed = False
        self._about = policy, settings, classes, weights
        self._clock = clock
        self._output_tokens = FIRST_GUESS_TOKENS
        self._on_since: int | None = 0 if self.up else None
        self._was_on: list[tuple[int, int]] = []
        self.recorder = FlightRecorder(None)
        self._boot()

    def _boot(self) -> None:
        """Begin with nothing."""
        policy, settings, classes, weights = self._about
        about, pool = self.description, self.description.pool
        self.kv = BlockPool(
            about.blocks, pool.block_tokens, pool.max_batch_size, host_blocks=pool.host_kv_blocks
        )
        self.scheduler = Scheduler(policy, self.kv, about.cost_model(), self.engine.capabilities, settings)
        for cls in classes:  # so that indices are the same everywhere
            self.scheduler.life.class_index(cls)
        for tenant, weight in weights.items():
            self.scheduler.set_tenant(tenant, weight)
        self._found: I32 = np.empty(0, np.int32)  # by row; empty while no request has digests
        self._coming = 0
        self._going = 0

    def power_on(self, now: int) -> None:
        """From now on its cards are paid for."""
        if self._on_since is None:
            self._on_since = now

    def power_off(self, now: int) -> None:
        """Its cards are given back."""
        if self._on_since is not None:
            self._was_on.append((self._on_since, now))
            self._on_since = None

    def on_ns(self, first: int, last: int) -> int:
        """How long its cards were there between two times."""
        spans = self._was_on + ([] if self._on_since is None else [(self._on_since, last)])
        return sum(max(min(until, last) - max(since, first), 0) for since, until in spans)

    def fail(self) -> list[Left]:
        """Lose everything. Returns the requests that were open, but for those that only leave their KV."""
        now, s = self._clock.now_ns(), self.scheduler
        records = s.table.records
        left = [
            Left.of_row(name, records[row])
            for name, row in s.life.ids.items()
            if records[row]["state"] != State.GOING
        ]
        self.up, self.failed = False, True
        self.engine.stop(now)
        self.power_off(now)
        self.recorder.close()  # what comes after has another beginning
        self._boot()
        return left

    def recover(self) -> None:
        """It takes requests, again or for the first time."""
        self.up, self.failed = True, False
        self.power_on(self._clock.now_ns())

    def drain(self) -> None:
        """Take no more requests."""
        self.up = False
        self.rest()

    def rest(self) -> None:
        """Switch off, if there is nothing to do and nothing will come."""
        if not self.up and not self.open_requests and not self._going:
            self.power_off(self._clock.now_ns())

    def withdraw(self, request_id: str) -> None:
        """Forget a request whose KV was coming; it goes on elsewhere."""
        now = self._clock.now_ns()
        self.scheduler.cancel(request_id, now)
        self.recorder.called(Call.CANCEL, now, text=request_id, slot=self.scheduler.life.slot)
        endings = self.scheduler.take_endings()
        self.recorder.ended(endings, self.scheduler.life.slot)
        self._forget(endings)
        self._coming -= 1

    def never_runs(self, request: Request) -> Refusal | None:
        """Why a request could never be finished here, if so."""
        s = self.scheduler
        return never_runs(request, s.policy, s.capabilities, self.kv)

    def submit(self, request: Request, work: Work) -> Refusal | None:
        """Queue a request, or say why not."""
        s, now = self.scheduler, self._clock.now_ns()
        refusal = s.submit(request, now)
        if refusal is not None:
            self.recorder.refused(request, refusal, now, s.life.slot)
        else:
            row = s.life.ids[request.id]
            seq, tenant = int(s.table.seq[row]), int(s.table.tenant[row])
            self.recorder.opened(request, seq, row, tenant, now, s.life.slot)
            self.engine.open(row, work)
            self._coming += request.begun is not None and request.begun.sent
            if request.block_hashes or self._found.size:
                self._expect_cached(request)
        return refusal

    def landed(self, request_id: str) -> None:
        """The KV of a request is here that was computed elsewhere."""
        now = self._clock.now_ns()
        self.scheduler.landed(request_id, now)
        self.recorder.called(Call.LANDED, now, text=request_id, slot=self.scheduler.life.slot)
        self._coming -= 1

    def keep(self) -> None:
        """A request ended here whose KV stays until `handed_over`."""
        self._going += 1

    def handed_over(self, request_id: str) -> None:
        """Its KV is elsewhere now."""
        self.scheduler.handed_over(request_id)
        now = self._clock.now_ns()
        self.recorder.called(Call.HANDED_OVER, now, text=request_id, slot=self.scheduler.life.slot)
        self._going -= 1

    def begin(self) -> list[Ending]:
        """Decide as long as the engine can take it. Returns requests that ended by a decision."""
        endings: list[Ending] = []
        s, now = self.scheduler, self._clock.now_ns()
        while (
            s.in_flight <= self.engine.capabilities.depth
            and self.engine.free_ns <= now
            and self.open_requests > self._coming
        ):
            decision = s.decide(now)
            records, cutoffs = s.trace.drain()
            if self.recorder.on:
                self.recorder.decided(
                    decision, now, records, cutoffs, load_of(s), quantum_tokens=s.quantum.tokens
                )
            ended = s.take_endings()
            self.recorder.ended(ended, s.life.slot)
            endings += ended
            if decision.empty:
                break
            self.engine.execute(decision)
        if self.recorder.due:
            self.recorder.keyframe(now, s.life.slot)
        self._forget(endings)
        return endings

    def end(self) -> Happened:
        """Take in the oldest step, which ends now."""
        result = self.engine.collect()
        applied = self.scheduler.apply(result)
        self.recorder.applied(result)
        self.recorder.noted(self.scheduler.trace.drain()[0], result.ended_ns)
        endings = self.scheduler.take_endings()
        self.recorder.ended(endings, self.scheduler.life.slot)
        if not applied.emitted.all():
            self.engine.take_back(result, applied.emitted)
        self._forget(endings)
        return Happened(applied.tokens, endings)

    def next_ns(self) -> int | None:
        """When something happens here next: a step ends, a stage is free, or, lacking both, a later look."""
        now, s = self._clock.now_ns(), self.scheduler
        ends = self.engine.next_end_ns()
        if ends is None:
            later = SENDING_RETRY_NS if self._going else RETRY_NS
            return now + later if self.open_requests > self._coming else None
        free = self.engine.free_ns
        return min(ends, free) if free > now and s.in_flight <= self.engine.capabilities.depth else ends

    @property
    def open_requests(self) -> int:
        """Requests that wait or run, or whose KV is on the way here."""
        return self.scheduler.table.open_rows - self._going

    def load(self) -> Load:
        """What routers are told."""
        s, now = self.scheduler, self._clock.now_ns()
        t, rows = s.table, s.table.running_rows()
        waiting = s.waiting.tokens
        if self._found.size:
            queued = np.flatnonzero(t.state == State.WAITING)
            queued = queued[queued < self._found.size]
            waiting -= int(self._found[queued].sum())
        kv_tokens = self.kv.live_blocks() * self.kv.block_tokens + waiting
        return Load(
            at_ns=now,
            open_requests=self.open_requests,
            running=t.running_count,
            prefill_tokens=waiting + int(np.maximum(t.prompt[rows] - t.computed[rows], 0).sum()),
            context_tokens=int(t.computed[rows].sum()),
            demand=max(
                self.open_requests / self.description.pool.max_batch_size,
                kv_tokens / (self.kv.total_blocks * self.kv.block_tokens),
            ),
            token_ns=s.life.rates[1],
            output_tokens=self._output_tokens,
        )

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a prompt that it would not have to compute if it came now."""
        return self.kv.prefix_tokens(request.block_hashes, request.prompt_tokens - 1)

    def step_ns(self, decodes: int, context_tokens: int) -> float:
        """Time of a step of so many decodes that read so many positions together."""
        features = np.zeros(N_FEATURES)
        features[F_SLOT] = 1.0
        features[F_DECODES], features[F_CONTEXT] = decodes, context_tokens
        return self.description.timing.iteration_ns(features)

    def _expect_cached(self, request: Request) -> None:
        """Remember how much of a queued prompt is cached, for `load`."""
        row = self.scheduler.life.ids[request.id]
        if row >= self._found.size:
            self._found = np.append(self._found, np.zeros(row + 1, np.int32))
        self._found[row] = self.cached_tokens(request)

    def _forget(self, endings: list[Ending]) -> None:
        for ending in endings:
            self.engine.close(ending.row)
            if ending.outcome == Outcome.COMPLETED:
                self._output_tokens += (ending.outputs - self._output_tokens) / RECENT_OUTPUTS
