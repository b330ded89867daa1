"""Random schedules through the real scheduler, pool and engine, and the output that they must give.

The reference is `transformers`' own greedy generation, one prompt at a time. Where its two best logits
are closer than `NEAR_TIE`, either token is right; such places are counted, and generation goes on from
the reference's choice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kaiseki.core.decision import F64, I64, Bool
from kaiseki.core.protocols import N_FEATURES
from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.switching import LinearSwitch
from kaiseki.core.table import NO_ROW
from kaiseki.cost.online import FixedLinear
from kaiseki.engines.driver import Driver
from kaiseki.engines.embedded import EmbeddedEngine, GenerationWork, SamplingParams
from kaiseki.engines.updates import Update
from kaiseki.memory.hashing import chain_hashes
from kaiseki.memory.pool import BlockPool
from kaiseki.policies.fcfs import Fcfs

NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Reference:
    """Greedy output of the model alone, with how far ahead each chosen logit was."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


Jobs = Sequence[tuple[Reference, int]]
"""Prompts with their expected outputs, and how many copies of each to ask for."""


def reference(model: Any, prompt: Sequence[int], max_tokens: int) -> Reference:
    """What `generate` makes of a prompt, never stopping early."""
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    margins = [float((best := step[0].topk(2).values)[0] - best[1]) for step in made.logits]
    return Reference(tuple(prompt), tuple(made.sequences[0, len(prompt) :].tolist()), tuple(margins))


@dataclass
class Chaos:
    """What a random schedule does, drawn anew in every slot.

    Attributes:
        seed: decides everything.
        preempt: chance per slot that a random running request loses its KV.
        budget: largest token budget of a slot.
        batch: most requests at once.
    """

    seed: int
    preempt: float = 0.2
    budget: int = 24
    batch: int = 6


class Coin(LinearSwitch):
    """Swaps half of those that are stopped, at random."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(1.0)
        self._rng = rng

    def prefers_swap(self, blocks: I64, recompute_ns: F64) -> Bool:
        return np.array([self._rng.random() < 0.5 for _ in blocks], np.bool_)


@dataclass
class Outputs:
    """What came out, by request id, and what the schedule did on the way."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    preemptions: int = 0
    swaps: int = 0
    cached: int = 0

    def sink(self, update: Update) -> None:
        self.tokens.setdefault(update.request_id, []).extend(update.token_ids)
        self.cached += update.cached_tokens if update.outcome else 0
        if update.outcome:
            self.outcomes[update.request_id] = update.outcome


def run_schedule(engine: EmbeddedEngine, pool: BlockPool, jobs: Jobs, chaos: Chaos) -> Outputs:
    """Run every (reference, copies) under a random schedule; copies > 1 are forks of the first.

    Args:
        engine: over `pool`; idle before and after.
        pool: empty of requests before and after.
        jobs: prompts with their expected outputs.
        chaos: what kind of schedule.
    """
    rng = random.Random(chaos.seed)
    weights = np.full(N_FEATURES, 1e3)
    settings = SchedulerSettings(max_batch_size=chaos.batch, quantum_tokens=1, watermark_ratio=1.0)
    scheduler = Scheduler(Fcfs(), pool, FixedLinear(weights), engine.capabilities, settings)
    if engine.capabilities.swap_block_ns:
        scheduler.life.switching = Coin(rng)
    driver = Driver(scheduler, engine)
    out = Outputs()
    arrivals = _arrivals(jobs, pool.block_tokens, rng, chaos.seed)
    while arrivals or driver.busy:
        for _ in range(rng.randrange(4)):
            if arrivals:
                request, work = arrivals.pop(0)
                driver.submit(request, work, out.sink)
        scheduler.policy = replace(Fcfs(), budget_tokens=rng.randint(1, chaos.budget))
        if rng.random() < chaos.preempt:
            out.preemptions += _preempt_one(driver, rng)
            out.swaps += len(scheduler.life.swapped)
            scheduler.life.swapped.clear()
        driver.step()
        pool.check()
    assert pool.live_blocks() == 0 and scheduler.table.open_rows == 0
    return out


def _arrivals(jobs: Jobs, block: int, rng: random.Random, salt: int) -> list[tuple[Request, GenerationWork]]:
    order = list(range(len(jobs)))
    rng.shuffle(order)
    made = []
    for j in order:
        ref, copies = jobs[j]
        length = len(ref.tokens)
        sampling = SamplingParams(max_tokens=length, min_tokens=length, temperature=0.0, ignore_eos=True)
        # Salted, so that a schedule shares prefixes within itself and not with the ones before it.
        hashes = chain_hashes(np.array(ref.prompt, np.int32), block, salt=str(salt).encode())
        for copy in range(copies):
            request = Request(
                f"{j}.{copy}",
                len(ref.prompt),
                length,
                min_tokens=length,
                block_hashes=hashes,
                fork_of=f"{j}.0" if copy else None,
            )
            made.append((request, GenerationWork(ref.prompt, sampling)))
    return made


def _preempt_one(driver: Driver, rng: random.Random) -> int:
    """Take the KV of one running request away, in flight or not, as a shortage of memory would."""
    life = driver.scheduler.life
    rows = life.table.running_rows()
    if rows.size == 0:
        return 0
    victim = np.array([rng.choice(rows.tolist())], np.int32)
    if victim[0] == driver.scheduler.champion:
        driver.scheduler.champion = NO_ROW
    life.preempt(victim, Event.PREEMPTED, Reason.FORCED_BY_GROWTH, driver.clock.now_ns())
    return 1


def differences(jobs: Jobs, out: Outputs) -> tuple[list[str], list[tuple[int, int]]]:
    """Wrong outputs, in words, and near-ties where an output took the other token, as (job, place)."""
    wrong, ties = [], []
    for j, (ref, copies) in enumerate(jobs):
        for copy in range(copies):
            got = out.tokens.get(f"{j}.{copy}", [])
            place = next((k for k, (a, b) in enumerate(zip(got, ref.tokens, strict=False)) if a != b), None)
            if out.outcomes.get(f"{j}.{copy}") != Outcome.COMPLETED or len(got) != len(ref.tokens):
                wrong.append(f"{j}.{copy}: {out.outcomes.get(f'{j}.{copy}')}, {len(got)} tokens")
            elif place is not None and ref.margins[place] < NEAR_TIE:
                ties.append((j, place))
            elif place is not None:
                wrong.append(f"{j}.{copy}: token {place} is {got[place]}, not {ref.tokens[place]}")
    return wrong, ties


def check_schedule(engine: EmbeddedEngine, pool: BlockPool, jobs: Jobs, chaos: Chaos) -> tuple[Outputs, int]:
    """Assert that a random schedule gives the reference's output. Returns what it did and its near-ties.

    After a near-tie that went the other way, the rest is generated from the reference's choice on.
    """
    out = run_schedule(engine, pool, jobs, chaos)
    wrong, ties = differences(jobs, out)
    assert not wrong, wrong
    counted = len(ties)
    while ties:
        rest = []
        for j, place in ties:
            ref = jobs[j][0]
            if place + 1 < len(ref.tokens):
                prompt = ref.prompt + ref.tokens[: place + 1]
                rest.append((Reference(prompt, ref.tokens[place + 1 :], ref.margins[place + 1 :]), 1))
        jobs = rest
        again = run_schedule(engine, pool, jobs, replace(chaos, seed=chaos.seed + 1))
        wrong, ties = differences(jobs, again)
        assert not wrong, wrong
        counted += len(ties)
    return out, counted
