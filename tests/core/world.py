"""A scheduler, a pool, a scripted card and their clients, driven one move at a time.

Everything that clients and the card were told is kept apart from the scheduler's own books, so that the
audits (`audits`) compare two accounts of the same history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
from tests.core.books import SLOWEST, Books
from tests.harness import MS, SMALL, START_NS, Job, KVCheckingEngine, Named, hashes, job, naming, prompt_ids

from kaiseki.core.decision import Decision, StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.policy import Policy
from kaiseki.core.protocols import Capabilities, CostModel
from kaiseki.core.reasons import Event
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import NO_ROW
from kaiseki.cost.online import FixedLinear, OnlineLinear
from kaiseki.engines.clock import VirtualClock
from kaiseki.memory.pool import BlockPool

PIPELINES = {0: True, 1: True, 3: False}
"""Depth of the pipeline, and whether rows may be scheduled again before their last token is known."""
FORCED = (int(Event.PREEMPTED),)


@dataclass(slots=True)
class Client:
    """One accepted request as its owner sees it.

    Attributes:
        job: what was asked for, and what will come.
        row: its row in the request table.
        life: rises when what is in flight for it becomes void.
        order: when it was last admitted, counted over all requests; -1 while it does not run.
        tokens: what it got.
        ending: how it ended.
        service_ns: card time of steps that were not void.
    """

    job: Job
    prompt: list[int]
    row: int
    life: int = 0
    order: int = -1
    tokens: list[int] = field(default_factory=list)
    ending: Ending | None = None
    service_ns: float = 0.0

    @property
    def id(self) -> str:
        return self.job.request.id

    @property
    def running(self) -> bool:
        return self.ending is None and self.order >= 0


@dataclass(slots=True)
class Flight:
    """A decision in flight: whose chunks they were, and in which of their lives."""

    decision: Decision
    owners: list[tuple[Client, int]]

    def stale(self) -> list[bool]:
        return [c.ending is not None or c.life != life for c, life in self.owners]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a world. A roomy one never lacks rows or blocks, so that the theorems on shares apply."""

    policy: Policy
    depth: int = 0
    blocks: int = 24
    page: int = 4
    roomy: bool = False
    learns: bool = False
    adapter_slots: int = 0
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    seed: int = 0


class World:
    """See the module.

    Args:
        shape: sizes.
        audit: called after every move.
        each_decision, each_result: called after every decision and every result.
    """

    def __init__(
        self,
        shape: Shape,
        audit: Callable[[World], None] = lambda world: None,
        each_decision: Callable[[World, Decision], None] = lambda world, decision: None,
        each_result: Callable[[World, StepResult, Flight], None] = lambda world, result, flight: None,
    ) -> None:
        self.shape, self.depth, self.page = shape, shape.depth, shape.page
        self.disjoint = shape.depth > 0 and not PIPELINES[shape.depth]
        self.clock = VirtualClock(START_NS)
        self.pool = BlockPool(shape.blocks, shape.page, max_rows_hint=2)
        self.caps = Capabilities(
            depth=shape.depth,
            placeholders=PIPELINES[shape.depth],
            adapter_slots=shape.adapter_slots,
            adapter_load_ns=5 * MS,
        )
        cost: CostModel = OnlineLinear(SMALL) if shape.learns else FixedLinear(SMALL)
        self.scheduler = Scheduler(shape.policy, self.pool, cost, self.caps, shape.settings)
        self.books = Books(self.scheduler)
        self._watch_lifts()
        jitter = Random(shape.seed)
        self.engine = KVCheckingEngine(
            self.clock,
            SMALL,
            self.caps,
            self.pool,
            lambda: jitter.uniform(0.8, SLOWEST),
            adapters=self.scheduler.adapters.names,
        )
        self.clients: dict[str, Client] = {}
        self.flights: deque[Flight] = deque()
        self.cutoffs: dict[int, tuple[float, ...]] = {}
        self.before = Before()
        self.champion: Client | None = None
        self.champion_idle = 0
        self.idle = 0
        self.charged: tuple[np.ndarray, np.ndarray] | None = None
        self._admissions = 0
        self._names = 0
        self._audit, self.each_decision, self.each_result = audit, each_decision, each_result

    # ------------------------------------------------------------------ moves

    def submit(
        self,
        length: int,
        outputs: int,
        stops_at: int | None = None,
        shared: int = 0,
        group: int = 0,
        breaks_at: int = -1,
        retryable: bool = False,
        hashed: bool = True,
        fork_of: Client | None = None,
        **of_request: object,
    ) -> Client | None:
        """A request arrives now; None when it was refused."""
        self._names += 1
        name = f"r{self._names}"
        adapter = of_request.get("adapter")  # KV depends on it, and so do the digests of a real prompt
        prompt = prompt_ids(
            group if adapter is None else 100 + ord(str(adapter)), shared, self._names, length
        )
        if fork_of is not None:
            prompt, length = fork_of.prompt, len(fork_of.prompt)
            of_request["fork_of"] = fork_of.id
            of_request["adapter"] = fork_of.job.request.adapter
        digests = hashes(prompt, self.page) if hashed else ()
        now = self.clock.now_ns()
        asked = job(
            name, length, outputs, now, None, stops_at, self._names, breaks_at, retryable,
            block_hashes=digests, **of_request,
        )  # fmt: skip
        s = self.scheduler
        waiting = len(s.waiting)
        refusal = s.submit(asked.request, now)
        if refusal is not None:
            assert name not in s.life.ids and len(s.waiting) == waiting, "a refused request left something"
            self._after()
            return None
        client = Client(asked, prompt, s.life.ids[name])
        self.clients[name] = client
        self.engine.open(client.row, Named(asked.script, naming(prompt, asked.script)))
        self._after()
        return client

    def cancel(self, client: Client) -> None:
        """The client gives up; it may have ended already, which changes nothing."""
        was_open = client.ending is None
        assert self.scheduler.cancel(client.id, self.clock.now_ns()) == was_open
        self._after()
        assert client.ending is not None

    def set_tenant(self, name: str, weight: float) -> None:
        self.scheduler.set_tenant(name, weight)
        self._after()

    def wait(self, ms: int) -> None:
        self.clock.advance_to(self.clock.now_ns() + ms * MS)

    def decide(self, work_limit: int | None = None) -> Decision | None:
        """One decision, handed to the card; None when it would be one too many."""
        s = self.scheduler
        if s.in_flight > self.depth:
            return None
        self._look_before()
        self.charged = None
        decision = s.decide(self.clock.now_ns(), work_limit)
        self._take_endings()
        records, cutoffs = s.trace.drain()
        self.cutoffs.update(zip(cutoffs["tenant"].tolist(), cutoffs.tolist(), strict=True))
        stopped = [self.of_row(int(row)) for row in decision.preempted]
        noted = np.isin(records["event"], FORCED)
        assert sorted(int(s.table.seq[c.row]) for c in stopped) == sorted(records["seq"][noted].tolist())
        for client in stopped:
            client.life += 1
            client.order = -1
        self._admit(decision)
        self._watch_champion(decision)
        if not decision.empty:
            self.engine.execute(decision)
            owners = [self.of_row(int(row)) for row in decision.rows]
            self.flights.append(Flight(decision, [(c, c.life) for c in owners]))
        self.each_decision(self, decision)
        self._after()
        return decision

    def collect(self) -> StepResult | None:
        """The oldest step ends; None when none is in flight."""
        if not self.flights:
            return None
        s, flight = self.scheduler, self.flights[0]
        result = self.engine.collect()
        stale = flight.stale()
        touched = {c.row for (c, _), old in zip(flight.owners, stale, strict=True) if not old}
        void = [c.row for (c, _), old in zip(flight.owners, stale, strict=True) if old]
        void = [row for row in void if row not in touched]
        kept = s.table.records[void].copy()
        charged, measured = s._inflight[result.slot].charged, float(result.ended_ns - result.started_ns)
        self._look_before()
        applied = s.apply(result)
        self.flights.popleft()
        upto = np.cumsum(result.new_tokens)
        for i, (client, _) in enumerate(flight.owners):
            ids = result.token_ids[upto[i] - result.new_tokens[i] : upto[i]].tolist()
            good = not stale[i] and not result.failed[i]
            assert bool(applied.emitted[i]) == (good and len(ids) > 0), "tokens of a stale or failed chunk"
            if good:
                client.tokens += ids
            if not stale[i]:
                client.service_ns += charged[i] * measured / charged.sum()
            if not stale[i] and result.failed[i] and result.retryable[i]:
                client.life += 1
                client.order = -1
        self._check_untouched(void, kept)
        self._take_endings()
        s.trace.drain()
        self.each_result(self, result, flight)
        self._after()
        return result

    def drain(self) -> None:
        """Nothing arrives any more: everything open must end."""
        slots = 0
        most = 100 + 40 * sum(len(c.prompt) + c.job.request.max_tokens for c in self.open())
        while self.open() or self.flights:
            decision = self.decide()
            while decision is not None and not decision.empty:
                decision = self.decide()
            self.collect()
            slots += 1
            assert slots <= most, f"{[c.id for c in self.open()]} are still open after {slots} slots"

    # ------------------------------------------------------------------ what is known outside

    def open(self) -> list[Client]:
        return [c for c in self.clients.values() if c.ending is None]

    def of_row(self, row: int) -> Client:
        return self.clients[self.scheduler.life.names[row]]

    def in_flight(self, client: Client) -> bool:
        """Whether a chunk of its present life is in flight."""
        return any((client, client.life) in flight.owners for flight in self.flights)

    # ------------------------------------------------------------------

    def _watch_lifts(self) -> None:
        """Tell what a slot charged from what closing its books lifted."""
        fair, settle = self.scheduler.fairness, self.scheduler.fairness.settle

        def settled(entries: np.ndarray, waiting: np.ndarray, near: np.ndarray, limits: np.ndarray) -> None:
            self.charged = fair.counter.copy(), fair.lane_counter.copy()
            settle(entries, waiting, near, limits)

        fair.settle = settled  # type: ignore[method-assign]

    def _after(self) -> None:
        self._take_endings()
        self._audit(self)

    def _take_endings(self) -> None:
        for ending in self.scheduler.take_endings():
            client = self.clients[ending.request_id]
            assert client.ending is None, f"{client.id} ended twice"
            client.ending = ending
            self.engine.close(client.row)

    def _admit(self, decision: Decision) -> None:
        for row in decision.rows.tolist():
            client = self.of_row(row)
            if client.order < 0:
                client.order = self._admissions
                self._admissions += 1

    def _look_before(self) -> None:
        fair = self.scheduler.fairness
        self.before = Before(
            fair.counter.copy(),
            fair.lane_counter.copy(),
            {c.id: (c.life, c.order) for c in self.open() if c.running},
            {c.id for c in self.open() if self.in_flight(c)},
        )

    def _watch_champion(self, decision: Decision) -> None:
        """Who it was stays it while it runs; a new one is the oldest of those that ran; it gets its turn."""
        row, before = self.scheduler.champion, self.before.running
        if row == NO_ROW:
            assert not any(c.running and c.id in before for c in self.open()), "nobody is the champion"
            self.champion = None
            return
        champion, old = self.of_row(row), self.champion
        assert row not in decision.preempted, "the champion was stopped"
        assert champion.id in before and champion.life == before[champion.id][0]
        if old is not champion:
            self.champion_idle = 0
            kept = old is not None and old.running and old.id in before
            assert not kept, f"{old} was still running"
            assert all(c.order >= champion.order for c in self.open() if c.running and c.id in before), (
                "the champion is not the oldest"
            )
        self.champion = champion
        if row in decision.rows:
            self.champion_idle = 0
        elif champion.id not in self.before.in_flight:
            self.champion_idle += 1
        most = self.shape.policy.starving_slots + 2 * (self.depth + 1)
        assert self.champion_idle <= most, f"the champion got nothing for {self.champion_idle} slots"

    def _check_untouched(self, rows: list[int], kept: np.ndarray) -> None:
        """A void result changes nothing of whoever has the row now, but a fork may be let go meanwhile."""
        now = self.scheduler.table.records[rows]
        for name in kept.dtype.names or ():
            if name in ("state", "group", "fork_of"):
                continue
            assert np.array_equal(kept[name], now[name]), f"a stale result changed {name}"


@dataclass(slots=True)
class Before:
    """What a move found.

    Attributes:
        counter, lane_counter: of tenants, and of their lanes.
        running: id of each running request, and its life and order of admission.
        in_flight: ids of those with a chunk in flight.
    """

    counter: np.ndarray = field(default_factory=lambda: np.zeros(0))
    lane_counter: np.ndarray = field(default_factory=lambda: np.zeros(0))
    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    in_flight: set[str] = field(default_factory=set)
