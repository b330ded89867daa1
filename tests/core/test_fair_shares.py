"""The theorems of docs/fairness.md, attacked: random tenants, weights, lengths, step times, depths."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.books import SLOWEST, Books
from tests.harness import MS, START_NS, Bench, Job, job

from kaiseki.core.limits import N_LIMITS
from kaiseki.core.policy import Policy
from kaiseki.core.requests import ServiceClass
from kaiseki.core.scheduler import Filled
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

# 2 ms a slot, 0.1 ms a decode, 0.05 ms a prefill token: a slot of 256 tokens takes 15 ms.
CARD = np.array([2e6, 0.1e6, 0.0, 0.05e6, 10.0, 1.0, 0.0])
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
        waiting = bench.scheduler.waiting.by_group()
        settle(filled.entries, waiting, waiting, np.full(N_LIMITS, 1e9))
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
