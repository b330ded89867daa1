"""Steps of an engine behind its server, while clients stream from it: what they take longer is the host's."""

from __future__ import annotations

import asyncio
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from kaiseki.calibrate import client
from kaiseki.calibrate.client import Phase, Seen
from kaiseki.config import Settings
from kaiseki.engines.logged import LoggedEngine, Steps
from kaiseki.server.app import create_app
from kaiseki.server.build import Stack
from kaiseki.server.run import DrainingServer, bind, url_of

DRAIN_S = 5.0


class NoAnswers(RuntimeError):
    """The server answered none of the requests that were to measure it."""


def served_steps(
    stack: Stack, settings: Settings, folder: Path, phases: tuple[Phase, ...] = client.PHASES
) -> tuple[Steps, float]:
    """Serve clients on a free port, and take notes.

    Args:
        stack: not started yet; it can't be used for anything else afterwards.
        settings: what it was made with.
        folder: of the model, for its tokenizer.
        phases: what the clients do; in the first, each is alone.

    Returns:
        The steps, and the median time from a request's arrival until the engine could have begun it, us.

    Raises:
        NoAnswers: a phase had none.
    """
    logged = LoggedEngine(stack.driver.engine, stack.driver.scheduler.table)
    stack.driver.engine = logged
    stack.driver.start()
    found = asyncio.run(_serve(stack, settings, folder, phases))
    if not all(found):
        raise NoAnswers("the server did not answer the requests that were to measure it")
    steps = logged.steps()
    return steps, float(np.median([intake_us(seen, steps) for seen in found[0]]))


async def _serve(
    stack: Stack, settings: Settings, folder: Path, phases: tuple[Phase, ...]
) -> list[list[Seen]]:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    app = create_app(stack.driver, stack.text, settings, stack.backlog)
    server = DrainingServer(app, DRAIN_S, ready.set)
    with bind("127.0.0.1", 0) as listener, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await ready.wait()
            url, name = url_of(listener), stack.text.name
            return await loop.run_in_executor(pool, client.run, url, name, folder, phases)
        finally:
            server.begin_drain()
            await serving


def intake_us(seen: Seen, steps: Steps) -> float:
    """What a lone request's first token took beyond the steps that made it, us."""
    ended_ms = steps.ended_ns / 1e6
    mine = (ended_ms > seen.arrival_ms) & (ended_ms <= seen.first_ms + 1e-3)
    return max(0.0, (seen.first_ms - seen.arrival_ms) * 1e3 - float(steps.turn_ns[mine].sum()) / 1e3)
