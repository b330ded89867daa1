"""Clients of the server that is measured; they run in a process of their own, as real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kaiseki.demo.client import Answer, Clients
from kaiseki.demo.prompts import BATCH, INTERACTIVE, PromptMaker, encoder


class Phase(NamedTuple):
    """Streams of requests, each sent when the one before has been answered.

    Attributes:
        streams: how many at once, by class of prompt.
        requests: of each stream.
    """

    streams: Mapping[str, int]
    requests: int


class Seen(NamedTuple):
    """Times of one answer, on the server's clock, ms."""

    arrival_ms: float
    first_ms: float


LONE = Phase({INTERACTIVE: 1}, 6)
PHASES = (
    LONE,
    Phase({BATCH: 1}, 3),
    Phase({INTERACTIVE: 4}, 4),
    Phase({INTERACTIVE: 12}, 3),
    Phase({INTERACTIVE: 6, BATCH: 2}, 4),
)


def run(url: str, model: str, folder: Path, phases: Sequence[Phase] = PHASES) -> list[list[Seen]]:
    """Go through all phases; the answers of each that had tokens."""
    return asyncio.run(_run(url, model, folder, phases))


async def _run(url: str, model: str, folder: Path, phases: Sequence[Phase]) -> list[list[Seen]]:
    maker = PromptMaker(encoder(folder), seed=0)
    found: list[list[Seen]] = []
    async with Clients(url, model, {INTERACTIVE: "none", BATCH: "none"}) as clients:
        for phase in phases:
            streams = [cls for cls, count in phase.streams.items() for _ in range(count)]
            answers = await asyncio.gather(*(_stream(clients, maker, c, phase.requests) for c in streams))
            found.append([_seen(a) for stream in answers for a in stream if a.token_ms.size])
    return found


async def _stream(clients: Clients, maker: PromptMaker, cls: str, requests: int) -> list[Answer]:
    return [await clients.ask(maker.make(cls)) for _ in range(requests)]


def _seen(answer: Answer) -> Seen:
    return Seen(answer.arrival_ms, float(answer.token_ms[0]))
