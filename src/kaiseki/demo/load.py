"""The load: which requests arrive when, at which rate, in which mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from kaiseki.demo.prompts import BATCH, INTERACTIVE, Prompt, PromptMaker

OVERLOAD = 1.3
"""Offered rate over the sustainable one."""
MOST_INTERACTIVE = 0.4
"""Largest part of the offered work that interactive requests may be."""


@dataclass(frozen=True, slots=True)
class LoneTime:
    """How long a request takes alone: a linear form of its lengths, fitted to measurements.

    Attributes:
        base_s: whatever the lengths.
        prompt_s: per prompt token.
        output_s: per output token after the first.
    """

    base_s: float
    prompt_s: float
    output_s: float

    def prefill_s(self, prompt_tokens: int) -> float:
        """Until the first token."""
        return self.base_s + self.prompt_s * prompt_tokens

    def work_s(self, prompt: Prompt) -> float:
        """Until the last token: what is called the work of a request."""
        return self.prefill_s(prompt.prompt_tokens) + self.output_s * (prompt.output_tokens - 1)


def fit_lone_time(prompts: Sequence[Prompt], first_s: Sequence[float], last_s: Sequence[float]) -> LoneTime:
    """Fit measured lone times to first and last token; no coefficient below 0."""
    rows = []
    for prompt in prompts:
        rows.append((1.0, prompt.prompt_tokens, 0.0))
        rows.append((1.0, prompt.prompt_tokens, prompt.output_tokens - 1.0))
    times = np.array([t for pair in zip(first_s, last_s, strict=True) for t in pair])
    # Relative errors count, or the long documents would decide everything.
    weights, _ = nnls(np.array(rows) / times[:, None], np.ones(times.size))
    return LoneTime(*(float(w) for w in weights))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the load.

    Attributes:
        at_s: when it is sent, after the start.
        prompt: what it asks.
    """

    at_s: float
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals, earliest first, and what they amount to.

    Attributes:
        seconds: the span of arrivals.
        offered_ratio: offered work per second over sustainable work per second.
        interactive_share: part of the offered work that is interactive.
    """

    arrivals: tuple[Arrival, ...]
    seconds: float
    offered_ratio: float
    interactive_share: float


def mixed(maker: PromptMaker, lone: LoneTime) -> Iterator[Prompt]:
    """Prompts without end: interactive as long as they stay within MOST_INTERACTIVE of the work so far."""
    work = {INTERACTIVE: 0.0, BATCH: 0.0}
    question = maker.make(INTERACTIVE)
    while True:
        interactive = work[INTERACTIVE] + lone.work_s(question)
        if interactive <= MOST_INTERACTIVE * (interactive + work[BATCH]):
            prompt, question = question, maker.make(INTERACTIVE)
        else:
            prompt = maker.make(BATCH)
        work[prompt.cls] += lone.work_s(prompt)
        yield prompt


def make_load(maker: PromptMaker, lone: LoneTime, sustainable: float, seconds: float, seed: int) -> Load:
    """Poisson arrivals that offer OVERLOAD times the sustainable work.

    A Poisson process given the number of its arrivals: uniform times, requests in random order. The number
    is fixed so that every seed offers the same; chance decides what comes when.

    Args:
        sustainable: work that the engine gets done, seconds of lone time per second.
    """
    wanted = OVERLOAD * sustainable * seconds
    chosen: list[Prompt] = []
    total = interactive = 0.0
    for prompt in mixed(maker, lone):
        work = lone.work_s(prompt)
        if chosen and total + work / 2 > wanted:
            break
        chosen.append(prompt)
        total += work
        interactive += work if prompt.cls == INTERACTIVE else 0.0
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0.0, seconds, len(chosen)))
    order = rng.permutation(len(chosen))
    arrivals = tuple(Arrival(float(t), chosen[i]) for t, i in zip(times, order, strict=True))
    return Load(arrivals, seconds, total / (sustainable * seconds), interactive / total)
