"""What this machine can do, measured through the server: lone times, a step of eight, sustainable work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kaiseki.demo.attainment import Targets
from kaiseki.demo.client import Answer, Clients, Exchange
from kaiseki.demo.load import LoneTime, fit_lone_time
from kaiseki.demo.prompts import BATCH, INTERACTIVE, Prompt, PromptMaker

BUDGETS = (64, 128, 256, 512)
"""Token budgets that the baselines may get."""
DECODES = 8
SAMPLE = 200
TTFT_FACTOR, TBT_FACTOR, DEADLINE_FACTOR = 5.0, 2.0, 5.0
CONCURRENCY = 16
WARM_PART = 0.2
"""Part of the closed loop that is not counted, while its requests are all at the same stage."""


class MeasureError(RuntimeError):
    """A request of the measurement was not answered."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found on the idle machine.

    Attributes:
        prefill_ms: until the first token of an interactive prompt of median length.
        batch_ms: until the last token of a batch request of median length.
        step_ms: between tokens when eight requests decode together.
        lone: fit of all lone times.
        median_prompt: prompt tokens of the two, interactive and batch.
    """

    prefill_ms: float
    batch_ms: float
    step_ms: float
    lone: LoneTime
    median_prompt: tuple[int, int]

    @property
    def ttft_target_ms(self) -> float:
        """Of the interactive class."""
        return TTFT_FACTOR * self.prefill_ms

    @property
    def tbt_target_ms(self) -> float:
        """Of the interactive class."""
        return TBT_FACTOR * self.step_ms

    @property
    def deadline_ms(self) -> float:
        """Of the batch class, to the last token."""
        return DEADLINE_FACTOR * self.batch_ms

    @property
    def targets(self) -> dict[str, Targets]:
        """By class."""
        interactive = Targets(ttft_ms=self.ttft_target_ms, tbt_ms=self.tbt_target_ms)
        return {INTERACTIVE: interactive, BATCH: Targets(deadline_ms=self.deadline_ms)}

    def slot_ms(self, prefill_tokens: int) -> float:
        """Predicted length of a slot of eight decodes and a prefill chunk."""
        return self.step_ms + self.lone.prompt_s * 1000 * prefill_tokens

    def budget(self) -> int:
        """The largest budget with which such a slot stays within the TBT target, else the smallest."""
        within = [b for b in BUDGETS if self.slot_ms(b) <= self.tbt_target_ms]
        return max(within, default=min(BUDGETS))


async def measure(clients: Clients, maker: PromptMaker, lone_requests: tuple[int, int] = (9, 5)) -> Measured:
    """Measure on an otherwise idle server.

    Args:
        clients: where.
        maker: source of prompts.
        lone_requests: how many interactive and batch requests to send alone.

    Raises:
        MeasureError: a request was not answered.
    """
    sample = {cls: [maker.make(cls) for _ in range(SAMPLE)] for cls in (INTERACTIVE, BATCH)}
    alone = {}
    for cls, count in zip((INTERACTIVE, BATCH), lone_requests, strict=True):
        prompts = nearest_median(sample[cls], count)
        if cls == INTERACTIVE:  # their decodes are measured by the batch requests too; this saves time
            prompts = [replace(prompt, output_tokens=16) for prompt in prompts]
        alone[cls] = [_complete(await clients.ask(prompt)) for prompt in prompts]
    together = [replace(prompt, output_tokens=48) for prompt in sample[INTERACTIVE][:DECODES]]
    eight = await asyncio.gather(*(clients.ask(prompt) for prompt in together))
    answers = [*alone[INTERACTIVE], *alone[BATCH]]
    lone = fit_lone_time(
        [a.prompt for a in answers], [a.ttft_ms / 1000 for a in answers], [a.e2e_ms / 1000 for a in answers]
    )
    medians = tuple(int(np.median([p.prompt_tokens for p in sample[cls]])) for cls in (INTERACTIVE, BATCH))
    return Measured(
        prefill_ms=float(np.median([a.ttft_ms for a in alone[INTERACTIVE]])),
        batch_ms=float(np.median([a.e2e_ms for a in alone[BATCH]])),
        step_ms=step_ms([_complete(a) for a in eight]),
        lone=lone,
        median_prompt=(medians[0], medians[1]),
    )


def nearest_median(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The prompts whose prompt and output lengths are nearest to the medians of all."""
    size = np.array([(p.prompt_tokens, p.output_tokens) for p in prompts], np.float64)
    middle = np.median(size, axis=0)
    off = np.abs(size / middle - 1).max(axis=1)
    return [prompts[i] for i in np.argsort(off, kind="stable")[:count]]


def step_ms(answers: Sequence[Answer]) -> float:
    """Median gap while all of these requests decode.

    Raises:
        MeasureError: there was no such time.
    """
    begin = max(float(a.token_ms[0]) for a in answers)
    end = min(float(a.token_ms[-1]) for a in answers)
    gaps = [a.gaps_ms[(a.token_ms[:-1] >= begin) & (a.token_ms[1:] <= end)] for a in answers]
    if not sum(g.size for g in gaps):
        raise MeasureError("the requests that were to decode together did not overlap")
    return float(np.median(np.concatenate(gaps)))


async def sustainable_work(
    clients: Clients, prompts: Iterator[Prompt], lone: LoneTime, seconds: float
) -> float:
    """Work per second, in seconds of lone time, that gets done when there is always more of it.

    Counted token by token, so that requests that are cut off by either end of the measurement count for
    what was done of them: prompt tokens as the server counts them, output tokens by their stamps.

    Raises:
        MeasureError: nothing got done.
    """
    exchanges: list[Exchange] = []

    async def worker() -> None:
        while True:
            exchange, task = clients.begin(next(prompts))
            exchanges.append(exchange)
            await task

    workers = [asyncio.create_task(worker()) for _ in range(CONCURRENCY)]
    try:
        await asyncio.sleep(WARM_PART * seconds)
        begin_ms, prompted = time.monotonic_ns() / 1e6, await clients.prompt_tokens_done()
        await asyncio.sleep((1 - WARM_PART) * seconds)
        end_ms, prompted = time.monotonic_ns() / 1e6, await clients.prompt_tokens_done() - prompted
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    done = sum(output_work(exchange.answer(), lone, begin_ms, end_ms) for exchange in exchanges)
    done += lone.prompt_s * prompted
    if not done:
        raise MeasureError(f"no request made progress in {seconds:.0f} s")
    return done / (end_ms - begin_ms) * 1000


def output_work(answer: Answer, lone: LoneTime, begin_ms: float, end_ms: float) -> float:
    """A request's work in a span of time, apart from that for its prompt tokens."""
    inside = (answer.token_ms >= begin_ms) & (answer.token_ms < end_ms)
    return lone.base_s * int(inside[:1].sum()) + lone.output_s * int(inside[1:].sum())


def _complete(answer: Answer) -> Answer:
    if not answer.finished:
        raise MeasureError(f"a request was not answered: HTTP {answer.status} {answer.error}")
    return answer
