"""A profile of this machine: its engine alone over a grid of chunk sets, then behind its server."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kaiseki.calibrate import client
from kaiseki.calibrate.client import Phase
from kaiseki.calibrate.grid import grid
from kaiseki.calibrate.served import served_steps
from kaiseki.config import Scheduling, Server, Settings
from kaiseki.cost.calibrated import Profile, calibrate
from kaiseki.engines.logged import Steps
from kaiseki.models import Progress, quiet, resolve_model
from kaiseki.server.build import Stack, build
from kaiseki.server.measure import Round, measure

BUDGET_TOKENS = 96
"""Of a step while the server is measured: so small that long prompts are cut, as they are beside streams."""
SERVED_GROUP = 20
"""Steps behind the server that are left out of the fit together."""


def calibrate_here(
    settings: Settings,
    with_server: bool = True,
    progress: Progress = quiet,
    rounds: Sequence[Round] | None = None,
    phases: tuple[Phase, ...] = client.PHASES,
) -> Profile:
    """Measure the engine that the settings describe.

    Args:
        settings: model, engine and memory count; classes, tenants and policy don't.
        with_server: measure beside a server and its clients as well.
        progress: told what is being done.
        rounds, phases: what is measured, without and with the server.

    Raises:
        SetupError, ModelError: the model can't be run here.
        NoAnswers: the server did not answer.
    """
    plain = Settings(
        engine=settings.engine,
        memory=settings.memory,
        scheduling=Scheduling(policy="fcfs", budget_tokens=BUDGET_TOKENS),
        server=Server(port=0),
    )
    folder = resolve_model(settings.engine.model, progress=progress)
    stack = build(plain, progress)
    try:
        alone = _alone(stack, list(grid() if rounds is None else rounds), progress)
        if not with_server:
            return _profile(plain, stack, alone, None, 0.0)
        progress("measuring behind the server, with clients", 0, 0)
        steps, intake_us = served_steps(stack, plain, folder, phases)
        return _profile(plain, stack, alone, steps, intake_us)
    finally:
        stack.close()


def _alone(stack: Stack, rounds: Sequence[Round], progress: Progress) -> list[Steps]:
    scheduler = stack.driver.scheduler
    progress("measuring the engine", 0, len(rounds))
    found = []
    for _, steps in measure(stack.engine, scheduler.kv, scheduler.capabilities, rounds):
        found.append(steps)
        progress("measuring the engine", len(found), len(rounds))
    return found


def _profile(
    settings: Settings, stack: Stack, alone: Sequence[Steps], served: Steps | None, intake_us: float
) -> Profile:
    """Fit all steps together; those of a round are left out of the fit together."""
    parts = [*alone, *([] if served is None else [served])]
    groups = [np.full(len(steps.turn_ns), i) for i, steps in enumerate(alone)]
    if served is not None:
        groups.append(len(alone) + np.arange(len(served.turn_ns)) // SERVED_GROUP)
    beside = [np.full(len(steps.turn_ns), steps is served) for steps in parts]
    engine = settings.engine
    profile = calibrate(
        np.concatenate([steps.features for steps in parts]),
        np.concatenate([steps.turn_ns for steps in parts]),
        f"{Path(engine.model).name}, {engine.dtype}, embedded engine",
        np.concatenate(groups),
        np.concatenate(beside),
    )
    host = profile.host.model_copy(update={"request_us": intake_us})
    depth = stack.engine.capabilities.depth
    return profile.model_copy(update={"host": host, "pipeline_depth": depth, "machine": this_machine()})


def this_machine() -> str:
    """Architecture, processors that may be used, and memory."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors, {memory_gib:.0f} GiB"
