"""Step times from NVIDIA's published tables of measured kernels (aiconfigurator), fitted to a profile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.cost.calibrated import Profile, calibrate
from kaiseki.cost.features import chunk_features

SYSTEMS = {
    "a100-80": "a100_sxm",
    "b200": "b200_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "l4": "l4",
    "l40s": "l40s",
}
"""Our names of cards, and what the tables call them."""
ENGINES = ("vllm", "sglang", "trtllm")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
PREFIXES = (0, 512, 2048, 8192)
BESIDE = (4, 16, 64, 128)
BESIDE_CONTEXT = 2048
MOST_KV_TOKENS = 512 * 1024
"""Batch times context: more fits no card."""


class NoTables(ValueError):
    """There are no tables of this, or nothing that reads them; the message says what there is."""


def from_tables(model: str, card: str, tp: int, engine: str) -> Profile:
    """A profile of a model on a card, from tables.

    Args:
        model: as the tables' package knows it: `organisation/name` on Hugging Face, or a folder with a
            `config.json`.
        card: our name of it.
        tp: cards that share each layer.
        engine: whose kernels, one of `ENGINES`.

    Raises:
        NoTables: the package is not installed, or has nothing of the kind.
    """
    if card not in SYSTEMS:
        raise NoTables(f"--tables {card!r}: must be one of {', '.join(SYSTEMS)}")
    if engine not in ENGINES:
        raise NoTables(f"--engine {engine!r}: must be one of {', '.join(ENGINES)}")
    handle, version = _handle(model, SYSTEMS[card], tp, engine)
    samples = list(_samples(handle))
    features = np.array([found for found, _ in samples])
    milliseconds = np.array([ms for _, ms in samples])
    kept = np.isfinite(milliseconds) & (milliseconds > 0)
    source = f"{model} on {card}, tp {tp}: kernels of {engine}, tables of aiconfigurator-core {version}"
    profile = calibrate(features[kept], milliseconds[kept] * 1e6, source)
    # What the fit misses is no unevenness of the machine.
    return profile.model_copy(update={"spread": (), "machine": f"{tp} x {card}"})


def _handle(model: str, system: str, tp: int, engine: str) -> tuple[Any, str]:
    """The package's estimator of whole steps, and the package's version."""
    try:
        from importlib.metadata import version

        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        text = "--tables: needs the extra `profiles`: pip install 'kaiseki[profiles]'"
        raise NoTables(text) from None
    logging.disable(logging.WARNING)  # it tells of every table that it fills from another engine's
    try:
        return EngineHandle.compile(model, system, engine, tp_size=tp), version("aiconfigurator-core")
    except Exception as error:  # whatever it raises, it is about these names
        raise NoTables(f"--tables: nothing for {model} on {tp} x {system} with {engine}: {error}") from error
    finally:
        logging.disable(logging.NOTSET)


def _samples(handle: Any) -> Iterator[tuple[F64, float]]:
    """Features and milliseconds of steps: decodes, chunks at several depths, and both together."""
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch * context <= MOST_KV_TOKENS:
                # Its step is the second token's, which attends to the prompt, the first, and itself.
                yield chunk_features([context + 1] * batch), handle.predict_decode_latency(batch, context)
    for chunk in CHUNKS:
        for prefix in PREFIXES:
            # It wants the prompt's whole length, of which the prefix is cached.
            took = handle.predict_prefill_latency(1, prefix + chunk, prefix)
            yield chunk_features([], [prefix], [chunk]), took
        for decodes in BESIDE:
            # Its decodes attend to the prompt's length and half of the output's.
            more = max(1, BESIDE_CONTEXT - chunk)
            took = handle.mixed_step_latency(chunk, decodes, chunk, 2 * more)
            yield chunk_features([chunk + more] * decodes, [0], [chunk]), took
