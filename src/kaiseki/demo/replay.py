"""Replays a load: every request is sent at its time, whatever became of those before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kaiseki.demo.attainment import Targets, still_open_ms
from kaiseki.demo.client import Answer, Clients, Exchange
from kaiseki.demo.load import Load


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a load.

    Attributes:
        answers: one per arrival, in its order.
        start_ms: when it began, on the clock of the answers.
        latest_send_s: by how much the latest request was sent after its time.
    """

    answers: list[Answer]
    start_ms: float
    latest_send_s: float


async def replay(clients: Clients, load: Load, targets: Mapping[str, Targets]) -> Replayed:
    """Send all requests; once none arrives any more, cut off those that have missed their targets."""
    begin = time.monotonic()
    sent: list[tuple[Exchange, asyncio.Task[None], float]] = []
    latest = 0.0
    for arrival in load.arrivals:
        due = begin + arrival.at_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        latest = max(latest, time.monotonic() - due)
        exchange, task = clients.begin(arrival.prompt)
        cut = due + still_open_ms(targets[arrival.prompt.cls], arrival.prompt.output_tokens) / 1000
        sent.append((exchange, task, cut))
    await asyncio.sleep(max(0.0, begin + load.seconds - time.monotonic()))
    for _, task, cut in sorted(sent, key=lambda item: item[2]):
        await asyncio.wait({task}, timeout=max(0.0, cut - time.monotonic()))
        task.cancel()
    await asyncio.gather(*(task for _, task, _ in sent), return_exceptions=True)
    return Replayed([exchange.answer() for exchange, _, _ in sent], begin * 1000, latest)
