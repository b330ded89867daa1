"""From settings to a running driver: model, KV pool, cost model, scheduler, wired together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kaiseki import config
from kaiseki.config import Settings
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.cost.calibrated import Profile
from kaiseki.cost.online import OnlineLinear
from kaiseki.engines.clock import MonotonicClock
from kaiseki.engines.driver import Driver
from kaiseki.engines.embedded import EmbeddedEngine, EngineDied, ProcessEngine, UnsupportedModel
from kaiseki.engines.embedded.child_process import Child
from kaiseki.engines.embedded.engine import DTYPES
from kaiseki.engines.embedded.forward import pool_shape
from kaiseki.engines.embedded.work import GenerationWork, SamplingParams
from kaiseki.memory import BlockPool, chain_hashes
from kaiseki.models import ModelError, Progress, quiet, resolve_model
from kaiseki.observe.metrics import Bins
from kaiseki.observe.recorder.flight import FlightRecorder
from kaiseki.server.measure import step_weights

DEFAULT_CONTEXTS = 32
"""Without a size in the settings the pool holds this many longest requests, memory permitting,"""
DEFAULT_SHARE = 0.25
"""and takes at most this part of the memory that is free."""

MEMORY_MB = 32.0
"""Most of the flight recorder where it has no file."""

LocalEngine = EmbeddedEngine | ProcessEngine


class SetupError(RuntimeError):
    """The settings can't be made to run here; the message says why."""


class EmbeddedText:
    """The text side of an embedded engine, as the server wants it."""

    def __init__(self, engine: LocalEngine, name: str, max_context: int, pool: BlockPool) -> None:
        self.name = name
        self.max_context = max_context
        self.max_total_tokens = min(max_context, pool.total_blocks * pool.block_tokens)
        self.vocab_size = int(engine.config.vocab_size)
        self._engine = engine
        self._block_tokens = pool.block_tokens

    def encode(self, text: str) -> list[int]:
        """See `TextModel`."""
        return self._engine.encode(text)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """See `TextModel`."""
        return self._engine.render_chat(messages)

    def block_hashes(self, prompt_ids: Sequence[int]) -> tuple[bytes, ...]:
        """See `TextModel`."""
        return chain_hashes(np.asarray(prompt_ids, np.int32), self._block_tokens)


@dataclass(slots=True)
class Stack:
    """Everything behind the HTTP server. Start the driver; close the stack at the end."""

    driver: Driver
    engine: LocalEngine
    text: EmbeddedText

    def backlog(self) -> tuple[int, int]:
        """How many requests wait, and their prompt tokens."""
        return self.driver.backlog()

    def close(self) -> None:
        """End the driver's thread and the engine, with its process if it has one."""
        self.driver.stop()
        self.driver.recorder.close()
        self.engine.shutdown()


def build(settings: Settings, progress: Progress = quiet, child: Child | None = None) -> Stack:
    """Load the model, measure it, and put the scheduler in front of it. The driver is not started.

    Args:
        settings: all of them.
        progress: told what is being done.
        child: a process for the engine that was started before, for `engine.own_process`.

    Raises:
        SetupError: no such model or profile, the model is not supported, or the pool does not fit.
        ConfigError: the policy can't be made.
    """
    policy = config.policy(settings)
    profile = _profile(settings)
    engine, pool = _engine(settings, progress, child)
    progress("warming up" if profile is not None else "warming up and measuring step times", 0, 0)
    engine.warm_up()
    scheduling = settings.scheduler_settings()
    capabilities = engine.capabilities
    if settings.engine.max_context is not None:
        context = min(capabilities.max_context_tokens, settings.engine.max_context)
        capabilities = replace(capabilities, max_context_tokens=context)
    weights = step_weights(engine, pool, capabilities) if profile is None else np.array(profile.linear)
    scheduler = Scheduler(policy, pool, OnlineLinear(weights), capabilities, scheduling)
    for name, tenant in settings.tenants.items():
        scheduler.set_tenant(name, tenant.weight)
    name = Path(settings.engine.model).name.removesuffix(".gguf")
    bins = Bins(name, settings.metrics.tenant_labels)
    text = EmbeddedText(engine, name, capabilities.max_context_tokens, pool)
    recorder = _recorder(settings, scheduler, name)
    driver = Driver(
        scheduler, engine, bins=bins, recovery=settings.recovery(), probe=probe, recorder=recorder
    )
    if isinstance(engine, ProcessEngine):
        engine.watch(driver.break_off)
    return Stack(driver, engine, text)


def _recorder(settings: Settings, scheduler: Scheduler, model: str) -> FlightRecorder:
    """Into the folder that was asked for, or into a little memory."""
    now, about = MonotonicClock().now_ns(), {"engine": "embedded", "model": model}
    wanted = settings.recorder
    if wanted.folder is not None:
        return FlightRecorder.open(wanted.folder, now, wanted.size_mb, about, scheduler)
    return FlightRecorder.in_memory(now, min(wanted.size_mb, MEMORY_MB), about, scheduler)


def probe() -> tuple[Request, GenerationWork]:
    """The smallest request there is, to try an engine that failed on everything; see `Driver`."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return Request("kaiseki-probe", 1, 1, tenant="kaiseki-probe"), GenerationWork((0,), sampling)


def _profile(settings: Settings) -> Profile | None:
    path = settings.engine.profile
    if path is None:
        return None
    try:
        return Profile.load(Path(path))
    except OSError as error:
        raise SetupError(f"engine.profile: {path}: {error.strerror}") from error
    except ValueError as error:
        raise SetupError(f"engine.profile: {path}: {error}") from error


def _engine(settings: Settings, progress: Progress, child: Child | None) -> tuple[LocalEngine, BlockPool]:
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    wanted = settings.engine
    block = settings.memory.block_size
    try:
        folder = resolve_model(wanted.model, progress=progress)
        progress(f"loading {folder.name}", 0, 0)
        model = AutoConfig.from_pretrained(folder, local_files_only=True)
        shape = pool_shape(model, 1, block, DTYPES[wanted.dtype])
        most = model.max_position_embeddings
        blocks = _blocks(settings, shape.bytes, min(most, wanted.max_context or most))
        memory = settings.memory
        host = memory.host_tokens // block
        pool = BlockPool(
            blocks, block, eviction=memory.eviction, placement=memory.placement, host_blocks=host
        )
        options: dict[str, Any] = {
            "tables": pool,
            "blocks": blocks,
            "dtype": wanted.dtype,
            "block_tokens": block,
            "host_blocks": host,
            "threads": wanted.threads,
            "depth": wanted.pipeline_depth,
            "max_step_tokens": settings.scheduling.max_slot_tokens,
        }
        engine: LocalEngine
        if wanted.own_process:
            engine = ProcessEngine.load(folder, child=child, **options)
        else:
            engine = EmbeddedEngine.load(folder, **options)
    except (ModelError, UnsupportedModel, EngineDied, OSError, ValueError) as error:
        raise SetupError(f"model {wanted.model!r}: {error}") from error
    return engine, pool


def _blocks(settings: Settings, block_bytes: int, max_context: int) -> int:
    """Size of the pool in blocks."""
    memory = settings.memory
    if memory.pool_tokens is not None:
        blocks = -(-memory.pool_tokens // memory.block_size)
    elif memory.pool_bytes is not None:
        blocks = int(memory.pool_bytes) // block_bytes
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        wanted = DEFAULT_CONTEXTS * -(-max_context // memory.block_size)
        blocks = min(wanted, int(free * DEFAULT_SHARE) // block_bytes)
    if blocks < 2:
        raise SetupError(
            f"the KV pool would have {blocks} blocks of {block_bytes} bytes; it needs at least 2"
        )
    return blocks
