"""A driver on the scripted engine, fed in virtual time and audited after every slot."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kaiseki.core.decision import Decision, StepResult, Way
from kaiseki.core.policy import Policy
from kaiseki.core.protocols import Capabilities, CostModel
from kaiseki.core.reasons import Finish, Outcome
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import State
from kaiseki.cost.online import FixedLinear
from kaiseki.engines.clock import VirtualClock
from kaiseki.engines.driver import Driver, Probe
from kaiseki.engines.recovery import Recovery
from kaiseki.engines.scripted import Script, ScriptedEngine
from kaiseki.engines.updates import Update
from kaiseki.memory.hashing import chain_hashes
from kaiseki.memory.pool import BlockPool
from kaiseki.policies import registry
from kaiseki.policies.registry import load

MS = 1_000_000
S = 1_000_000_000
BUILT_IN = tuple(sorted(registry.BUILT_IN))
START_NS = S

# Llama-2-70B on eight cards, as in the design notes: 26 ms a slot, 0.115 ms a prefill token.
LARGE = np.array([26e6, 0.02e6, 0.0, 0.115e6, 46.0, 0.0, 0.0])
# A small model: 2 ms a slot, 0.1 ms a decode, 0.05 ms a prefill token.
SMALL = np.array([2e6, 0.1e6, 0.0, 0.05e6, 10.0, 1.0, 0.0])


@dataclass(slots=True)
class Job:
    """One request of a workload, and what will happen to it."""

    request: Request
    script: Script
    cancel_ns: int | None = None


@dataclass(slots=True)
class Served:
    """What the owner of a request was told."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    endings: list[Update] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def outcome(self) -> Outcome:
        return self.endings[0].outcome if self.endings else Outcome.OPEN

    @property
    def end(self) -> Update:
        return self.endings[0]

    @property
    def ttft_ns(self) -> int:
        return self.times_ns[0] - self.job.request.arrival_ns

    @property
    def gaps_ns(self) -> list[int]:
        return [b - a for a, b in zip(self.times_ns, self.times_ns[1:], strict=False)]


def prompt_ids(group: int, shared: int, own: int, length: int) -> list[int]:
    """A prompt whose first `shared` tokens are those of its group; the rest are its own."""
    shared = min(shared, length)
    return [group * 1009 + p for p in range(shared)] + [
        500_000 + own * 997 + p for p in range(length - shared)
    ]


class KVCheckingEngine(ScriptedEngine):
    """A scripted engine that knows what each KV slot holds, and that a chunk reads what it should.

    The content of a position is named by the tokens up to it. A chunk must find the right content at
    all positions before its start; block copies are done first, as decisions say.
    """

    def __init__(
        self,
        clock: VirtualClock,
        weights: np.ndarray,
        capabilities: Capabilities,
        pool: BlockPool,
        jitter: Callable[[], float] | None = None,
        check: bool = True,
        adapters: Sequence[str] = (),
    ) -> None:
        super().__init__(clock, weights, capabilities, jitter, adapters)
        self.pool = pool
        self.check = check
        self.held: dict[int, list[object]] = defaultdict(lambda: [None] * pool.block_tokens)
        self.host: dict[int, list[object]] = {}
        self.names: dict[int, Callable[[int], object]] = {}
        self.void: dict[int, int] = {}
        self.writing: deque[dict[int, tuple[int, int, object]]] = deque()
        self.decisions: list[Decision] = []
        self.results: list[StepResult] = []

    def open(self, row: int, work: object) -> None:
        assert isinstance(work, Named)
        super().open(row, work.script)
        self.names[row] = work.name
        self.void.pop(row, None)

    def execute(self, decision: Decision) -> None:
        super().execute(decision)
        self.decisions.append(decision)
        self.writing.append({})
        if self.check:
            self._check_content(decision)

    def _check_content(self, decision: Decision) -> None:
        for way, source, target in decision.swaps.tolist():
            there = self.host if way == Way.OUT else self.held
            there[target] = list((self.held if way == Way.OUT else self.host)[source])
        for source, target in decision.copies.tolist():
            self.held[target] = list(self.held[source])
        ends = decision.starts + decision.tokens
        tables = self.pool.tables(decision.rows, ends)
        page = self.pool.block_tokens
        written: set[tuple[int, int]] = set()
        for i, row in enumerate(decision.rows.tolist()):
            start, end, name = int(decision.starts[i]), int(ends[i]), self.names[row]
            script, epoch = self._scripts[row], int(decision.epochs[i])
            assert end < script.prompt_tokens + script.max_tokens, "computes more than max_tokens needs"
            broken = start <= script.breaks_at < end and row not in self._failed_once
            if self.void.get(row) == epoch:
                continue  # runs on top of a failed chunk; its result is dropped
            for p in range(start):
                found = self.held[int(tables[i, p // page])][p % page]
                assert found == name(p), f"slot {decision.slot}, row {row}: position {p} holds {found}"
            for p in range(start, end):
                block = int(tables[i, p // page])
                for others in self.writing:
                    # Siblings pass a shared block on while one writes behind the other's part of it.
                    owner = others.get(block, (row, epoch, name(0)))
                    given = owner[:2] != (row, epoch) and owner[2] != name(0)
                    assert not given, "a block that a step in flight writes was given away"
                self.writing[-1][block] = (row, epoch, name(0))
                assert (block, p % page) not in written, "two rows write to one place"
                written.add((block, p % page))
                self.held[block][p % page] = None if broken else name(p)
            if broken:
                self.void[row] = epoch

    def collect(self) -> StepResult:
        result = super().collect()
        self.results.append(result)
        self.writing.popleft()
        return result


@dataclass(slots=True)
class Named:
    """A script, and names for the KV of each position of the request."""

    script: Script
    name: Callable[[int], object]


def naming(prompt: list[int], script: Script) -> Callable[[int], object]:
    """KV of a position depends on all tokens up to it: those of the prompt, then this request's output."""
    heads = [0]

    def name(p: int) -> object:
        while len(heads) <= min(p + 1, len(prompt)):  # most benches never ask
            heads.append(hash((heads[-1], prompt[len(heads) - 1])))
        if p < len(prompt):
            return heads[p + 1]
        return (heads[-1], script.seed, p)

    return name


class Bench:
    """One scheduler, pool, engine and driver, and everything that was said to clients.

    Args:
        policy: a name, or a policy.
        depth, placeholders: the engine's pipeline.
        blocks, block_tokens, host_blocks: the KV pool.
        settings: of the scheduler.
        weights: true step times, ns per feature.
        cost: the scheduler's model; the true one when not given.
        jitter: factor on each step's true time.
        audit: check pool and table after every slot, and what every chunk reads.
        recovery, probe: see `Driver`.
    """

    def __init__(
        self,
        policy: str | Policy = "kaiseki",
        depth: int = 0,
        placeholders: bool = True,
        blocks: int = 4096,
        block_tokens: int = 16,
        settings: SchedulerSettings | None = None,
        weights: np.ndarray = SMALL,
        cost: CostModel | None = None,
        capabilities: Capabilities | None = None,
        jitter: Callable[[], float] | None = None,
        audit: bool = False,
        recovery: Recovery | None = None,
        probe: Probe | None = None,
        host_blocks: int = 0,
    ) -> None:
        self.clock = VirtualClock(START_NS)
        self.pool = BlockPool(blocks, block_tokens, max_rows_hint=8, host_blocks=host_blocks)
        caps = replace(capabilities or Capabilities(), depth=depth, placeholders=placeholders)
        self.policy = load(policy) if isinstance(policy, str) else policy
        self.scheduler = Scheduler(
            self.policy, self.pool, cost or FixedLinear(weights), caps, settings, origin_ns=0
        )
        self.engine = KVCheckingEngine(
            self.clock, weights, caps, self.pool, jitter, audit, self.scheduler.adapters.names
        )
        self.driver = Driver(self.scheduler, self.engine, self.clock, recovery=recovery, probe=probe)
        self.served: dict[str, Served] = {}
        self.prompts: dict[str, list[int]] = {}
        self.audit = audit
        self.slots = 0
        self.news = 0
        self.each_slot: Callable[[Bench], None] | None = None

    def submit(self, job: Job, prompt: list[int] | None = None) -> Served:
        """Hand a job to the driver now."""
        served = self.served[job.request.id] = Served(job)
        ids = prompt if prompt is not None else self.prompts.get(job.request.id)
        if ids is None:
            own = len(self.served)
            ids = prompt_ids(0, 0, own, job.request.prompt_tokens)

        def sink(update: Update) -> None:
            self.news += 1
            assert update.request_id == job.request.id, "an update went to another request's owner"
            assert not served.endings, f"news of {job.request.id} after its end: {update}"
            served.tokens.extend(update.token_ids)
            served.times_ns.extend([update.time_ns] * len(update.token_ids))
            served.cached_tokens = max(served.cached_tokens, update.cached_tokens)
            if update.outcome != Outcome.OPEN:
                served.endings.append(update)

        self.driver.submit(job.request, Named(job.script, naming(ids, job.script)), sink)
        return served

    def run(self, jobs: Iterable[Job] = (), until_ns: int | None = None, most_slots: int = 200_000) -> None:
        """Feed jobs at their arrival times and step until everything has ended, or until a time.

        Raises:
            AssertionError: nothing can be done though work is open, or an audit failed.
        """
        arrivals = deque(sorted(jobs, key=lambda j: (j.request.arrival_ns, j.request.id)))
        cancels = deque(sorted((j.cancel_ns, j.request.id) for j in arrivals if j.cancel_ns is not None))
        idle = 0
        while arrivals or self.driver.busy:
            now = self.clock.now_ns()
            if until_ns is not None and now >= until_ns:
                return
            while cancels and cancels[0][0] <= now:
                self.driver.cancel(cancels.popleft()[1])
            while arrivals and arrivals[0].request.arrival_ns <= now:
                self.submit(arrivals.popleft())
            if not self.driver.busy:
                self.clock.advance_to(arrivals[0].request.arrival_ns)
                continue
            news = self.news
            moved = self.driver.step()
            self.slots += 1
            assert self.slots <= most_slots, f"still busy: {self.driver.snapshot()}"
            if self.audit:
                self.check_slot()
            if self.each_slot is not None:
                self.each_slot(self)
            idle = 0 if moved or self.news > news else idle + 1
            if idle and self.driver.resting_until_ns is not None:
                upto = self.driver.resting_until_ns
                if arrivals:
                    upto = min(upto, arrivals[0].request.arrival_ns)
                self.clock.advance_to(upto)
                idle = 0
            assert idle < 2, f"livelock: {self.driver.snapshot()}"

    def check_slot(self) -> None:
        """What must hold between slots."""
        check_consistent(self.scheduler, self.pool)

    def check_end(self) -> None:
        """What must hold once everything has ended."""
        self.check_slot()
        assert self.pool.free_blocks() == self.pool.total_blocks, "blocks leaked"
        assert self.scheduler.table.open_rows == 0, "rows leaked"
        assert not self.engine._scripts, "the engine was not told of an end"
        assert self.scheduler.in_flight == 0 or not self.driver.busy
        for served in self.served.values():
            check_served(served)


def check_consistent(s: Scheduler, pool: BlockPool) -> None:
    """Table, queues, running set, counters and KV agree with each other."""
    pool.check()
    t = s.table
    running = t.running_rows()
    assert t.running_count <= s.settings.max_batch_size
    assert sorted(running.tolist()) == np.flatnonzero(t.state == State.RUNNING).tolist()
    assert len(s.waiting) == int((t.state == State.WAITING).sum())
    assert s.waiting.tokens == int(t.prompt[t.state == State.WAITING].sum())
    assert t.open_rows == int((t.state != State.FREE).sum()) == len(s.life.ids)
    assert (t.confirmed <= t.computed).all()
    assert (t.computed <= t.prompt + t.outputs + t.pending).all()
    assert (t.pending >= 0).all() and (t.outputs <= t.max_tokens).all()
    assert np.isfinite(s.fairness.counter).all()
    check_adapters(s)
    open_now = t.tenant[t.state != State.FREE]
    counted = s.fairness.open_requests
    assert counted.tolist() == np.bincount(open_now, minlength=counted.size).tolist()


def check_adapters(s: Scheduler) -> None:
    """Running requests pin their adapters; an adapter has one slot and a slot one adapter."""
    adapters, t = s.adapters, s.table
    a = adapters.records
    mine = t.adapter[t.running_rows()]
    assert a["pins"].tolist() == np.bincount(mine[mine >= 0], minlength=a.size).tolist()
    assert np.count_nonzero(a["pins"]) <= adapters.slots
    loaded = {int(slot): i for i, slot in enumerate(a["slot"].tolist()) if slot >= 0}
    assert len(loaded) == np.count_nonzero(a["slot"] >= 0), "two adapters in one slot"
    assert loaded == {slot: i for slot, i in enumerate(adapters.held.tolist()) if i >= 0}


def check_served(served: Served) -> None:
    """One outcome; the output that was scripted, whatever the schedule; max_tokens kept."""
    script, request = served.job.script, served.job.request
    assert len(served.endings) == 1, f"{request.id} ended {len(served.endings)} times"
    length = min(script.output_tokens, script.max_tokens)
    expected = [script.token(i) for i in range(length)]
    if served.outcome == Outcome.COMPLETED:
        assert served.tokens == expected, f"{request.id}: output depends on the schedule"
        wanted = Finish.STOP if script.output_tokens <= script.max_tokens else Finish.LENGTH
        assert served.end.finish == wanted
    else:
        assert served.tokens == expected[: len(served.tokens)]
        assert served.end.finish == Finish.NONE
    if served.outcome == Outcome.REFUSED:
        assert not served.tokens
    assert len(served.tokens) <= request.max_tokens
    assert served.times_ns == sorted(served.times_ns)


def job(
    name: str,
    prompt: int,
    outputs: int,
    at_ns: int = START_NS,
    cancel_ns: int | None = None,
    stops_at: int | None = None,
    seed: int | None = None,
    breaks_at: int = -1,
    retryable: bool = False,
    **of_request: object,
) -> Job:
    """A job that produces `outputs` tokens for certain unless it stops before."""
    certain = outputs if stops_at is None else 1
    fields: dict[str, object] = {"min_tokens": certain, "arrival_ns": at_ns, **of_request}
    request = Request(name, prompt, outputs, **fields)  # type: ignore[arg-type]
    script = Script(
        prompt,
        outputs + 1 if stops_at is None else stops_at,
        outputs,
        seed if seed is not None else sum(map(ord, name)),
        breaks_at,
        retryable,
        request.adapter,
    )
    return Job(request, script, cancel_ns)


def hashes(prompt: list[int], block_tokens: int) -> tuple[bytes, ...]:
    """Digests of a prompt's full blocks."""
    return chain_hashes(prompt, block_tokens)
