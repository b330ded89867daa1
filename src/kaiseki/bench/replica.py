"""A scheduler with everything that surrounds it in a server except the engine, to measure what a slot costs.

The same calls in the same order as the driver makes: history, metrics and endings are part of the slot.
What a step would have produced is made up outside of the measured time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from kaiseki.core.decision import F64, I32, Decision, StepResult
from kaiseki.core.policy import Policy
from kaiseki.core.protocols import N_FEATURES, Capabilities
from kaiseki.core.reasons import Finish
from kaiseki.core.requests import NEVER_NS, OnLate, Request, ServiceClass
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.cost.online import OnlineLinear
from kaiseki.engines.reporting import report_endings, report_slot, report_step, write_keys
from kaiseki.memory.hashing import DIGEST_BYTES, chain_hashes
from kaiseki.memory.pool import BlockPool
from kaiseki.observe.explain import explain
from kaiseki.observe.history import History, Story
from kaiseki.observe.metrics import Bins
from kaiseki.observe.recorder.flight import FlightRecorder, load_of

MS = 1_000_000
S = 1_000 * MS
CLOCK = time.thread_time_ns
"""CPU time of this thread: what else the machine does is not in it."""

PROMPT_TOKENS = 64
MAX_TOKENS = 4096
VOCABULARY = 40_000
PAGE = 16
TENANTS = 8

STEP_NS = np.zeros(N_FEATURES)
STEP_NS[:6] = 4e6, 4e3, 5e4, 4e3, 0.02, 0.02
"""True step times, ns per feature: a card on which even 4,096 decodes stay within a TBT of 60 ms."""
JITTER = 0.03
"""Standard deviation of a step's time, relative."""

CHAT = ServiceClass("chat", ttft_ns=2 * S, tbt_ns=60 * MS, weight=4.0)
STANDARD = ServiceClass("standard", ttft_ns=20 * S, tbt_ns=120 * MS, weight=2.0)
BATCH = ServiceClass("batch", deadline_ns=24 * 3600 * S, on_late=OnLate.KEEP, tier=1)
MIX = (CHAT, CHAT, CHAT, STANDARD, STANDARD, STANDARD, BATCH, BATCH, BATCH, BATCH)
OLDEST_NS = 20 * S
"""What waits at the start arrived at most so long ago, so that targets pass all along."""
_CROWD = 16_384


class Arrival(NamedTuple):
    """A request to come: int32[n] token ids of its prompt, its class, who sent it and when."""

    prompt: I32
    cls: ServiceClass
    tenant: str
    arrival_ns: int


@dataclass(frozen=True, slots=True)
class SlotCost:
    """One slot.

    Attributes:
        decide, apply: thread CPU time, ns, with what the driver does around them.
        submit: the same for all that arrived before the slot.
        arrivals: how many those were.
        chunks: how many requests got something.
    """

    decide: int
    apply: int
    submit: int
    arrivals: int
    chunks: int

    @property
    def total(self) -> int:
        """Ns of everything."""
        return self.decide + self.apply + self.submit


class Replica:
    """One scheduler under a steady load, on a virtual clock.

    Args:
        policy: of the scheduler.
        running: most requests that run at once.
        slots: for how many slots the pool must have room.
        seed: of lengths, classes and what finishes.
    """

    def __init__(self, policy: Policy, running: int, slots: int, seed: int = 0) -> None:
        each = -(-(PROMPT_TOKENS + slots) // PAGE) + 1
        blocks = max(2 * each * running, 2 * (PROMPT_TOKENS + MAX_TOKENS) // PAGE)
        self.now = 1000 * S
        self.scheduler = Scheduler(
            policy,
            BlockPool(blocks, PAGE, max_rows_hint=running),
            OnlineLinear(STEP_NS),
            Capabilities(),
            SchedulerSettings(max_batch_size=running),
        )
        self.history = History()
        self.recorder = FlightRecorder(None)
        self.bins = Bins()
        self._random = np.random.default_rng(seed)
        self._ids = count()
        self._opened: list[tuple[int, Story]] = []

    # ------------------------------------------------------------------ requests

    def arrivals(self, many: int, age_ns: int = 0) -> list[Arrival]:
        """Make up requests of the mix that arrived up to `age_ns` ago."""
        r = self._random
        prompts = r.integers(0, VOCABULARY, (many, PROMPT_TOKENS)).astype(np.int32)
        kinds, tenants = r.integers(len(MIX), size=many).tolist(), r.integers(TENANTS, size=many).tolist()
        ages = r.integers(age_ns + 1, size=many).tolist()
        return [
            Arrival(prompt, MIX[kind], _tenant(tenant), self.now - age)
            for prompt, kind, tenant, age in zip(prompts, kinds, tenants, ages, strict=True)
        ]

    def submit(self, arrivals: Sequence[Arrival]) -> None:
        """As the driver does: digests of its blocks, the core, the story for `explain`, labels."""
        for arrival in arrivals:
            self._submit(*arrival)
        write_keys(self.scheduler, self._opened)

    def _submit(self, prompt: I32, cls: ServiceClass, tenant: str, arrival_ns: int) -> None:
        s = self.scheduler
        request = Request(
            f"r{next(self._ids)}",
            prompt.size,
            MAX_TOKENS,
            tenant,
            cls,
            arrival_ns,
            block_hashes=chain_hashes(prompt, PAGE),
        )
        refusal = s.submit(request, self.now)
        if refusal is not None:
            raise RuntimeError(f"the load does not fit the pool: {refusal}")
        row = s.life.ids[request.id]
        story = Story(request, int(s.table.seq[row]), int(s.table.tenant[row]))
        self.recorder.opened(request, story.seq, row, story.tenant, self.now, s.life.slot)
        self.history.opened(story)
        self._opened.append((row, story))
        self.bins.set_names(s.fairness.names, [c.name for c in s.life.classes])

    # ------------------------------------------------------------------ slots

    def slot(self, churn: int) -> SlotCost:
        """Arrivals, a decision, a step, its result: `churn` requests arrive, and as many end by a stop."""
        arrivals = self.arrivals(churn) if churn else ()
        begin = CLOCK()
        self.submit(arrivals)
        submitted = CLOCK()
        decision = self.decide()
        decided = CLOCK()
        result = self.step(decision, churn)
        stepped = CLOCK()
        self.apply(result)
        ended = CLOCK()
        chunks = decision.rows.size
        return SlotCost(decided - submitted, ended - stepped, submitted - begin, churn, chunks)

    def decide(self) -> Decision:
        """A decision, and what the driver does after it."""
        s = self.scheduler
        decision = s.decide(self.now)
        records, cutoffs = s.trace.drain()
        self.history.slot(decision.slot, self.now, records, cutoffs)
        self.recorder.decided(decision, self.now, records, cutoffs, load_of(s))
        report_slot(self.bins, s, decision, 0, records, cutoffs)
        self._close()
        return decision

    def apply(self, result: StepResult) -> None:
        """A step's result, and what the driver does after it."""
        applied = self.scheduler.apply(result)
        self.recorder.applied(result)
        records = self.scheduler.trace.drain()[0]
        self.history.note(records)
        self.recorder.noted(records, self.now)
        report_step(self.bins, applied, result.ended_ns - result.started_ns)
        self._close()

    def _close(self) -> None:
        endings = self.scheduler.take_endings()
        self.recorder.ended(endings, self.scheduler.life.slot)
        for ending in endings:
            self.history.ended(ending)
        report_endings(self.bins, endings)

    def step(self, decision: Decision, stops: int) -> StepResult:
        """What an engine would say: a token for whoever samples, a stop for some of them."""
        n = decision.rows.size
        sampling = np.flatnonzero(decision.samples)
        finish = np.zeros(n, np.int8)
        ending = self._random.choice(sampling, min(stops, sampling.size), replace=False)
        finish[ending] = Finish.STOP
        started, self.now = self.now, self.now + self._took_ns(decision)
        return StepResult(
            slot=decision.slot,
            rows=decision.rows,
            epochs=decision.epochs,
            new_tokens=decision.samples.astype(np.int32),
            token_ids=np.zeros(sampling.size, np.int32),
            finish=finish,
            failed=np.zeros(n, np.bool_),
            retryable=np.zeros(n, np.bool_),
            started_ns=started,
            ended_ns=self.now,
        )

    def _took_ns(self, decision: Decision) -> int:
        decodes = decision.starts >= PROMPT_TOKENS
        prefill = decision.tokens[~decodes].astype(np.float64)
        context, pairs = decision.starts[decodes].sum(), (prefill**2).sum() / 2
        features: F64 = np.array(
            [1.0, decodes.sum(), prefill.size, prefill.sum(), context, pairs, 0.0], np.float64
        )
        factor = max(0.5, 1.0 + JITTER * float(self._random.standard_normal()))
        return int(float(features @ STEP_NS) * factor)

    # ------------------------------------------------------------------ setting up

    def fill(self, running: int) -> None:
        """Have so many requests decode, of the mix's classes, and nothing wait.

        Raises:
            RuntimeError: they don't all run within a few slots, so that the load is not what it should be.
        """
        t, waiting = self.scheduler.table, self.scheduler.waiting
        for _ in range(running // 16 + 64):
            self.submit(self.arrivals(min(running - t.running_count - len(waiting), 256)))
            self.slot(0)
            if t.running_count == running and (t.outputs[t.running_rows()] > 0).all():
                return
        raise RuntimeError(f"only {t.running_count} of {running} requests run at once")

    def wait(self, waiting: int) -> None:
        """Have so many more wait, of the mix's classes, the oldest for `OLDEST_NS`."""
        self.submit(self.arrivals(waiting, OLDEST_NS))
        self.history.note(self.scheduler.trace.drain()[0])

    def crowd(self, waiting: int) -> None:
        """Have so many more wait, all of `BATCH`, quickly enough for a million of them.

        What `Scheduler.submit` does one by one is done in batches of rows here: columns are set as arrays,
        rows are keyed and pushed a batch at a time. Digests of prompts are random bytes instead of hashes,
        which look the same to the pool. There are no records of submits and no stories.
        """
        for done in range(0, waiting, _CROWD):
            self._crowd(min(_CROWD, waiting - done))

    def wait_among_them(self) -> str:
        """Have one more wait that comes after a crowd, submitted as any other. Its request id."""
        (last,) = self.arrivals(1)
        self.submit([last._replace(cls=BATCH)])
        self.history.note(self.scheduler.trace.drain()[0])
        return next(reversed(self.scheduler.life.ids))

    def explain(self, request_id: str) -> tuple[dict[str, Any], int]:
        """Why a request waits, and the thread CPU time in ns that it took to find out."""
        begin = CLOCK()
        told = explain(self.history, request_id, self.now)
        took = CLOCK() - begin
        if told is None:
            raise RuntimeError(f"nothing is known of {request_id}")
        return told, took

    def _crowd(self, many: int) -> None:
        life, t, r = self.scheduler.life, self.scheduler.table, self._random
        rows = np.array([t.take() for _ in range(many)], np.int32)
        tenants = np.array([life.fairness.tenant(_tenant(k)) for k in range(TENANTS)], np.int32)
        t.seq[rows] = np.arange(life._next_seq, life._next_seq + many)
        life._next_seq += many
        t.tenant[rows] = tenants[r.integers(TENANTS, size=many)]
        t.cls[rows] = life.class_index(BATCH)
        t.tier[rows], t.weight[rows], t.on_late[rows] = BATCH.tier, BATCH.weight, BATCH.on_late
        t.arrival_ns[rows] = self.now - r.integers(OLDEST_NS, size=many)
        t.deadline_ns[rows] = BATCH.deadline_ns or NEVER_NS
        t.prompt[rows], t.max_tokens[rows], t.min_tokens[rows] = PROMPT_TOKENS, MAX_TOKENS, 1
        pages = PROMPT_TOKENS // PAGE
        digests = r.bytes(DIGEST_BYTES * pages * many)
        for i, row in enumerate(rows.tolist()):
            name = f"r{next(self._ids)}"
            life.ids[name], life.names[row] = row, name
            parts = range(i * pages * DIGEST_BYTES, (i + 1) * pages * DIGEST_BYTES, DIGEST_BYTES)
            life.kv.register(row, tuple(digests[at : at + DIGEST_BYTES] for at in parts))
        opened = life.fairness.open_requests
        opened += np.bincount(t.tenant[rows], minlength=opened.size).astype(np.int32)
        life.enqueue(rows)


def _tenant(number: int) -> str:
    return f"tenant-{number}"
