"""How long steps take on this machine, measured on an engine that serves nobody else meanwhile.

Made-up requests run through a scheduler of their own, in batches and chunks of different sizes. What a server
measures before its first request is where its online cost model starts; `kaiseki calibrate` measures more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.protocols import Capabilities, Engine, KVSpace
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.cost.linear import GUESS_NS, fit
from kaiseki.cost.online import FixedLinear
from kaiseki.engines.driver import Driver
from kaiseki.engines.embedded.work import GenerationWork, SamplingParams
from kaiseki.engines.logged import LoggedEngine, Steps
from kaiseki.policies.fcfs import Fcfs


class Group(NamedTuple):
    """Requests that are alike: how many, and their lengths in tokens."""

    requests: int
    prompt: int
    output: int


class Round(NamedTuple):
    """Groups of requests that come at once, in this order, under a token budget per step."""

    budget: int
    groups: tuple[Group, ...]


START = (
    Round(256, (Group(1, 256, 6),)),
    Round(64, (Group(4, 64, 6),)),
    Round(128, (Group(8, 16, 6),)),
    Round(32, (Group(2, 192, 2),)),
    Round(96, (Group(1, 96, 2),)),
)
"""What a server measures before its first request, in a few seconds."""


def step_weights(engine: Engine, pool: KVSpace, capabilities: Capabilities) -> F64:
    """float64[N_FEATURES], ns per unit of feature; the pool and the engine are left empty."""
    steps = [found for _, found in measure(engine, pool, capabilities, START)]
    features = np.concatenate([s.features for s in steps])
    return fit(features, np.concatenate([s.took_ns for s in steps]).astype(np.float64))


def measure(
    engine: Engine, pool: KVSpace, capabilities: Capabilities, rounds: Iterable[Round]
) -> Iterator[tuple[Round, Steps]]:
    """Run one round after the other, each cut to what pool and context hold.

    The scheduling depends on no cost model: first come, first served within the budget.
    """
    rng = np.random.default_rng(0)
    room = min(capabilities.max_context_tokens, pool.total_blocks * pool.block_tokens)
    for number, given in enumerate(rounds):
        each = room // sum(group.requests for group in given.groups) - pool.block_tokens
        fitting = Round(given.budget, tuple(_cut(group, each) for group in given.groups))
        settings = SchedulerSettings(watermark_ratio=1.0)
        cost = FixedLinear(GUESS_NS)
        scheduler = Scheduler(Fcfs(budget_tokens=given.budget), pool, cost, capabilities, settings)
        logged = LoggedEngine(engine, scheduler.table)
        driver = Driver(scheduler, logged)
        for k, group in enumerate(fitting.groups):
            sampling = SamplingParams(max_tokens=group.output, temperature=0.0, ignore_eos=True)
            for i in range(group.requests):
                ids = rng.integers(1, 100, group.prompt).tolist()
                request = Request(f"measure-{number}-{k}-{i}", group.prompt, group.output)
                driver.submit(request, GenerationWork(ids, sampling), lambda update: None)
        driver.run_until_idle()
        yield fitting, logged.steps()


def _cut(group: Group, tokens: int) -> Group:
    """The group with prompts so short that prompt and output have at most so many tokens."""
    output = max(1, min(group.output, tokens - 1))
    return Group(group.requests, max(1, min(group.prompt, tokens - output)), output)
