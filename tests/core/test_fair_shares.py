"""The theorems of docs/fairness.md, attacked: random tenants, weights, lengths, step times, depths."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness import MS, START_NS, Bench, Job, job

from kaiseki.core.fairness import UNMET, Fairness, note_wants
from kaiseki.core.lanes import LANE_WEIGHT, LANES
from kaiseki.core.policy import Policy
from kaiseki.core.requests import ServiceClass
from kaiseki.core.scheduler import Filled, Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

# 2 ms a slot, 0.1 ms a decode, 0.05 ms a prefill token: a slot of 256 tokens takes 15 ms.
CARD = np.array([2e6, 0.1e6, 0.0, 0.05e6, 10.0, 1.0, 0.0])
SLOWEST = 1.25
CHAT = ServiceClass("chat", ttft_ns=300 * MS, tbt_ns=60 * MS)
PLAIN = ServiceClass("plain")


@dataclass
class Tenant:
    """What one tenant asks for: all of it at once, or spread."""

    weight: float
    jobs: int
    prompt: int
    outputs: int
    chats: bool
    every_ms: int


tenants = st.builds(
    Tenant,
    weight=st.sampled_from((0.5, 1.0, 3.0)),
    jobs=st.integers(1, 25),
    prompt=st.sampled_from((5, 40, 300, 1500)),
    outputs=st.sampled_from((1, 4, 30)),
    chats=st.booleans(),
    every_ms=st.sampled_from((0, 0, 7, 60)),
)


@dataclass
class Books:
    """Watches a scheduler's counters: the largest lag, grant, correction and unasked charge so far."""

    scheduler: Scheduler
    hard_lag: float = 0.0
    grant: float = 0.0
    error: float = 0.0
    worst: float = 0.0
    worst_lane: float = 0.0
    unmet_slots: int = 0
    champions: float = 0.0
    _champion_waits: int = 0

    def __post_init__(self) -> None:
        fair, settle, apply = self.scheduler.fairness, self.scheduler.fairness.settle, self.scheduler.apply

        def watched(entries: np.ndarray, waiting: np.ndarray, limits: np.ndarray) -> None:
            settle(entries, waiting, limits)
            flags = np.zeros((3, fair.lane_counter.size), np.bool_)
            note_wants(entries, waiting, limits, flags, np.zeros((3, fair.counter.size), np.bool_))
            self._look(fair, flags[UNMET])

        def measured(result: object) -> object:
            before = fair.counter.copy(), fair.lane_counter.copy()
            applied = apply(result)  # type: ignore[arg-type]
            for old, new in zip(before, (fair.counter, fair.lane_counter), strict=True):
                self.error = max(self.error, float(np.abs(new[: old.size] - old).max(initial=0.0)))
            return applied

        fair.settle = watched  # type: ignore[method-assign]
        self.scheduler.apply = measured  # type: ignore[method-assign, assignment]

    def _look(self, fair: Fairness, unmet: np.ndarray) -> None:
        flight = self.scheduler._inflight.get(self.scheduler.life.slot)
        self.hard_lag = max(self.hard_lag, fair.hard_lag_ns)
        if flight is not None:
            share = flight.charged / fair.weight[flight.groups // LANES]
            self.grant = max(self.grant, float((share / LANE_WEIGHT[flight.groups % LANES]).max()))
            self._count_champion(flight.decision.rows, share)
        if fair.lag_ns <= 0:
            return
        hungry = unmet.reshape(-1, LANES).any(axis=1)
        busy = fair.open_requests > 0
        if hungry.any() and busy.any():
            self.unmet_slots += 1
            self.worst = max(self.worst, float(fair.counter[busy].max() - fair.counter[hungry].min()))
        lanes = fair.lane_counter.reshape(-1, LANES)
        for tenant in np.flatnonzero(hungry):
            mine, wants = lanes[tenant], unmet.reshape(-1, LANES)[tenant]
            self.worst_lane = max(self.worst_lane, float(mine.max() - mine[wants].min()))

    def _count_champion(self, rows: np.ndarray, share: np.ndarray) -> None:
        if self._champion_waits >= self.scheduler.policy.starving_slots:
            self.champions += float(share[rows == self.scheduler.champion].sum())
        self._champion_waits = self.scheduler._champion_waits

    def bound(self, depth: int) -> float:
        """H + G + epsilon + R, as observed; a champion's steps may all have taken longer than predicted."""
        return self.hard_lag + self.grant + (depth + 1) * self.error + SLOWEST * self.champions


def load_of(parties: list[Tenant]) -> list[Job]:
    jobs = []
    for i, tenant in enumerate(parties):
        for n in range(tenant.jobs):
            at = START_NS + n * tenant.every_ms * MS
            cls = CHAT if tenant.chats else PLAIN
            jobs.append(job(f"{i}-{n}", tenant.prompt, tenant.outputs, at, tenant=str(i), cls=cls))
    return jobs


def watch(
    parties: list[Tenant],
    depth: int,
    seed: int,
    policy: Policy | None = None,
    rows: int = 1024,
    window: int = 3,
) -> tuple[Bench, Books]:
    rng = random.Random(seed)
    limits = SchedulerSettings(fairness_window=window, max_slot_tokens=256, max_batch_size=rows)
    bench = Bench(
        policy or load("kaiseki"),
        depth,
        placeholders=depth < 3,
        settings=limits,
        weights=CARD,
        jitter=lambda: rng.uniform(0.8, SLOWEST),
    )
    for i, tenant in enumerate(parties):
        bench.scheduler.set_tenant(str(i), tenant.weight)
    return bench, Books(bench.scheduler)


@pytest.mark.parametrize("depth", [0, 1, 3])
@given(parties=st.lists(tenants, min_size=2, max_size=5), seed=st.integers(0, 2**16))
@settings(max_examples=60)
def test_no_tenant_gets_further_ahead_of_one_that_wants_more_than_the_bound(
    depth: int, parties: list[Tenant], seed: int
) -> None:
    bench, books = watch(parties, depth, seed)
    bench.run(load_of(parties))
    bench.check_end()
    assert books.worst <= books.bound(depth) * (1 + 1e-9)


PROMPTS = (5, 100, 400, 1500, 4000)
GREEDY = [Tenant(1.0, 40, 1500, 30, False, 0), Tenant(1.0, 60, 40, 4, False, 7)]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_bound_is_broken_without_the_gate(depth: int) -> None:
    unfair = replace(load("kaiseki"), fair=False)  # type: ignore[type-var]
    bench, books = watch(GREEDY, depth, 1, unfair)
    settle = bench.scheduler.fairness.settle
    emit = bench.scheduler._emit

    def emitted(filled: Filled, *rest: object) -> object:
        decision = emit(filled, *rest)  # type: ignore[arg-type]
        settle(filled.entries, bench.scheduler.waiting.by_group(), np.full(6, 1e9))
        return decision

    bench.scheduler._emit = emitted  # type: ignore[method-assign, assignment]
    bench.run(load_of(GREEDY))
    assert books.unmet_slots > 50
    assert books.worst > books.bound(depth)


@pytest.mark.parametrize("depth", [0, 1])
@given(parties=st.lists(tenants, min_size=2, max_size=4), seed=st.integers(0, 2**16), rows=st.integers(2, 5))
@settings(max_examples=40)
def test_who_holds_all_rows_gives_way(depth: int, parties: list[Tenant], seed: int, rows: int) -> None:
    """With few rows tenants lack room; what the others may be ahead is H and what a slot can add to it."""
    bench, books = watch(parties, depth, seed, rows=rows)
    bench.run(load_of(parties))
    bench.check_end()
    slot = 256 * CARD[3] + CARD[0] + rows * CARD[1]
    least = min(tenant.weight for tenant in parties)
    assert books.worst <= books.bound(depth) + (depth + 2) * 1.25 * slot / least


@pytest.mark.parametrize("depth", [0, 1])
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from((5, 100, 400, 1500, 4000))), min_size=2, max_size=5
    ),
    every_ms=st.sampled_from((0, 11, 80)),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40)
def test_no_size_gets_further_ahead_of_another_inside_a_tenant(
    depth: int, sizes: list[tuple[int, int]], every_ms: int, seed: int
) -> None:
    """Without decodes nothing passes the lanes' gate without asking but the champion."""
    parties = [Tenant(1.0, jobs, prompt, 1, False, every_ms) for jobs, prompt in sizes]
    bench, books = watch(parties, depth, seed)
    bench.run([replace(j, request=replace(j.request, tenant="all")) for j in load_of(parties)])
    bench.check_end()
    assert books.worst_lane <= books.bound(depth) * (1 + 1e-9)
