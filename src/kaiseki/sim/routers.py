"""Which replica a request goes to: the ways that are in use, to compare with, and by predicted finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kaiseki.core.requests import Request


class Load(NamedTuple):
    """What a replica says of itself.

    Attributes:
        at_ns: when.
        open_requests: that wait or run.
        running: that run.
        prefill_tokens: of their prompts that are not computed.
        context_tokens: positions that those which run have computed.
        demand: rows or KV that they want over what there is, whichever is more; above 1 some must wait.
        token_ns: time per prompt token, alone.
        output_tokens: mean length of recent outputs.
    """

    at_ns: int
    open_requests: int
    running: int
    prefill_tokens: int
    context_tokens: int
    demand: float
    token_ns: float
    output_tokens: float


class Worker(Protocol):
    """A replica as routers see it."""

    def load(self) -> Load:
        """What it said of itself last."""
        ...

    def cached_tokens(self, request: Request) -> int:
        """Tokens of the prompt whose KV it has, as the directory of prefixes says."""
        ...

    def step_ns(self, decodes: int, context_tokens: int) -> float:
        """Predicted time of a step of so many decodes that read so many positions together."""
        ...

    def sending_ns(self, request: Request) -> float:
        """Until the KV of the prompt would be where decoding goes on, what waits for the links first."""
        ...


Router = Callable[[Request, Sequence[Worker]], int]
"""Gives an index into the workers that may take the request."""


def round_robin(seed: int, routers: int) -> Router:
    """One after the other."""
    turn = seed - 1

    def route(request: Request, workers: Sequence[Worker]) -> int:
        nonlocal turn
        turn += 1
        return turn % len(workers)

    return route


def at_random(seed: int, routers: int) -> Router:
    """Any."""
    rng = np.random.default_rng(seed)

    def route(request: Request, workers: Sequence[Worker]) -> int:
        return int(rng.integers(len(workers)))

    return route


def least_outstanding(seed: int, routers: int) -> Router:
    """The one with the fewest open requests."""

    def route(request: Request, workers: Sequence[Worker]) -> int:
        return min(range(len(workers)), key=lambda i: workers[i].load().open_requests)

    return route


def least_work(seed: int, routers: int) -> Router:
    """The one whose uncomputed prompts take least time."""

    def work(load: Load) -> tuple[float, int]:
        return load.prefill_tokens * load.token_ns, load.open_requests

    def route(request: Request, workers: Sequence[Worker]) -> int:
        return min(range(len(workers)), key=lambda i: work(workers[i].load()))

    return route


def prefix_aware(seed: int, routers: int) -> Router:
    """The one that last got a request with the longest common prefix; without any, the fewest open requests.

    It remembers where it sent what, and does not ask what is still cached.
    """
    sent: dict[bytes, Worker] = {}
    fallback = least_outstanding(seed, routers)

    def route(request: Request, workers: Sequence[Worker]) -> int:
        last = next((sent[d] for d in reversed(request.block_hashes) if d in sent), None)
        to = workers.index(last) if last in workers else fallback(request, workers)
        sent.update(dict.fromkeys(request.block_hashes, workers[to]))
        return to

    return route


def kv_aware(seed: int, routers: int) -> Router:
    """Where the request is predicted to finish first, by where its KV is and what is queued before it.

    The sum of four times: prompts that are queued, what of its own prompt is not cached there, what its KV
    waits and takes on a link (none in a whole replica), and its decode beside those that run. Where
    rows or KV are short it waits for others' ends as well.

    Between two reports of a worker a router counts what it has sent there itself, times the number of
    routers, since all act on the same report at the same time. Of equals each begins with another one.
    """
    sent: dict[Worker, deque[tuple[int, int]]] = {}  # (arrival, tokens to compute)

    def finish_ns(request: Request, worker: Worker, load: Load, output_tokens: float) -> float:
        mine = sent.setdefault(worker, deque())
        while mine and mine[0][0] <= load.at_ns:
            mine.popleft()
        others, tokens = routers * len(mine), routers * sum(tokens for _, tokens in mine)
        uncached = request.prompt_tokens - worker.cached_tokens(request)
        prefill_ns = (load.prefill_tokens + tokens + uncached) * load.token_ns
        context = load.context_tokens + tokens + request.prompt_tokens
        decode_ns = output_tokens * worker.step_ns(load.running + others + 1, context)
        wait_ns = max(load.demand - 1.0, 0.0) * decode_ns
        return wait_ns + prefill_ns + worker.sending_ns(request) + decode_ns

    def route(request: Request, workers: Sequence[Worker]) -> int:
        loads, n = [worker.load() for worker in workers], len(workers)
        output_tokens = sum(load.output_tokens for load in loads) / n
        costs = [finish_ns(request, w, load, output_tokens) for w, load in zip(workers, loads, strict=True)]
        to = min(range(n), key=lambda i: (costs[i], (i + seed) % n))
        uncached = request.prompt_tokens - workers[to].cached_tokens(request)
        sent[workers[to]].append((request.arrival_ns, uncached))
        return to

    return route


ROUTERS: dict[str, Callable[[int, int], Router]] = {
    "random": at_random,
    "round-robin": round_robin,
    "least-outstanding": least_outstanding,
    "least-work": least_work,
    "prefix-aware": prefix_aware,
    "kv-aware": kv_aware,
}
"""By name: given a number of its own and how many routers there are in all."""
