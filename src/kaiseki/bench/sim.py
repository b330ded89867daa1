"""How fast the simulator is, on the load for which other simulators' figures are known."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

from kaiseki.models.progress import Progress, quiet
from kaiseki.policies.registry import load
from kaiseki.sim import cluster
from kaiseki.sim.run import Case, simulate
from kaiseki.work import classes, fits
from kaiseki.work.arrivals import poisson
from kaiseki.work.batches import Batch
from kaiseki.work.oneshot import OneShot
from kaiseki.work.shaping import Shape

REQUESTS = 1_000
RATE_RPS = 1.0
MAX_TOTAL_TOKENS = 4_096
CLUSTER = """
model: llama-2-70b
pools: [{name: main, card: a100-80, tp: 2, pp: 2, max_batch_size: 128}]
"""
CHUNK_TOKENS = 512
NO_TARGETS = "{}"

TARGET_ITERATIONS = 15_000.0
TARGET_RSS_MB = 300.0
VIDUR = {"iterations_per_cpu_s": 2_200.0, "requests_per_cpu_s": 100.0, "peak_rss_mb": 1_000.0}
"""Measured on two cores with its fits cached; see `docs/simulator.md`."""


def run(requests: int = REQUESTS, progress: Progress = quiet) -> dict[str, Any]:
    """Simulate Azure conversation lengths, Poisson 1/s, Llama-2-70B on A100 TP2 x PP2, `sarathi`.

    What is compiled on first use runs before, on a few requests, and is told apart.
    """
    policy = load("sarathi", budget_tokens=CHUNK_TOKENS)
    case = Case(
        _stream, classes.parse(NO_TARGETS), cluster.fleet(cluster.parse(CLUSTER)),
        Shape(requests=requests, max_total_tokens=MAX_TOTAL_TOKENS),
    )  # fmt: skip
    progress("compiling", 0, 2)
    began = time.process_time()
    simulate(case.first(20), policy)
    warm_up_s = time.process_time() - began
    progress(f"{requests} requests", 1, 2)
    began = time.process_time()
    figures = simulate(case, policy)
    cpu_s = time.process_time() - began
    peak_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    per_s = figures["iterations"] / cpu_s
    return {
        "requests": requests,
        "iterations": figures["iterations"],
        "cpu_s": cpu_s,
        "warm_up_s": warm_up_s,
        "iterations_per_cpu_s": per_s,
        "requests_per_cpu_s": requests / cpu_s,
        "peak_rss_mb": peak_rss_mb,
        "ttft_ms": figures["ttft_ms"],
        "tbt_ms": figures["tbt_ms"],
        "vidur": VIDUR,
        "targets": [
            {"name": "iterations per CPU-second", "found": per_s, "target": TARGET_ITERATIONS,
             "ok": per_s >= TARGET_ITERATIONS},
            {"name": "peak RSS, MB", "found": peak_rss_mb, "target": TARGET_RSS_MB,
             "ok": peak_rss_mb <= TARGET_RSS_MB},
        ],
    }  # fmt: skip


def _stream(shape: Shape) -> Iterator[Batch]:
    return shape.apply(OneShot(poisson(RATE_RPS), fits.AZURE_PROMPT, fits.AZURE_OUTPUT).stream(1))
