"""Prompts over 32K tokens: how much of the KV they hold, and how long they wait."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster as clusters
from kaiseki.sim.experiments.rows import Experiment, Row, percent
from kaiseki.sim.experiments.setting import case_on, generated
from kaiseki.sim.loop import Log
from kaiseki.sim.run import run
from kaiseki.work.catalogue import mooncake_conversation

PLAN = """
classes:
  short: {ttft_ms: 1000, ttft_per_lone: 2, tbt_ms: 80, weight: 2}
  long: {ttft_ms: 5000, ttft_per_lone: 2, tbt_ms: 80, tier: 1}
assign:
  - {when: "input_tokens > 32000", class: long}
  - {class: short}
"""
RPS = 0.8
LARGEST = 0.2


def rows(requests: int) -> Iterator[Row]:
    """The same load under both orders."""
    workload = mooncake_conversation(RPS)
    case = case_on(clusters.load("70b-8xh100"), generated(workload), PLAN, requests)
    for name in ("fcfs", "kaiseki"):
        found = run(case, policy(name))
        classes = found.figures["classes"]
        long, short = classes.get("long"), classes.get("short")
        queued = long["queue_ms"] if long is not None else None
        yield Row(f"{name}: KV held by the largest 20 % of requests, %", _held_by_largest(found.log), 80.0)
        p99 = None if queued is None else queued["p99"]
        yield Row(f"{name}: queue P99 of prompts over 32K, ms", p99, 5_000.0)
        yield Row(
            f"{name}: prompts over 32K that were stopped",
            None if long is None else long["preempted_requests"],
        )
        yield Row(f"{name}: long attained, %", None if long is None else percent(long["attainment"]))
        yield Row(f"{name}: others attained, %", None if short is None else percent(short["attainment"]))


def _held_by_largest(log: Log) -> float | None:
    """Part of all token-seconds of KV that the largest requests held, %."""
    held = np.array(
        [(e.prompt + e.outputs) * (e.ended_ns - e.admitted_ns) for _, e in log.endings if e.admitted_ns >= 0],
        np.float64,
    )
    size = np.array([e.prompt + e.outputs for _, e in log.endings if e.admitted_ns >= 0])
    if not held.size:
        return None
    largest = np.argsort(size)[-max(1, round(LARGEST * size.size)) :]
    return float(100.0 * held[largest].sum() / held.sum())


EXPERIMENT = Experiment(
    title="Prompts over 32K tokens: do they fill the KV, and do they wait?",
    setting=(
        f"`70b-8xh100`, lengths and shared prefixes of the Mooncake conversations, {RPS:g} requests/s; "
        "`fcfs` against `kaiseki`."
    ),
    differs=(
        "How much the largest hold is the trace's, not the scheduler's; ours is held over time, prefixes "
        "counted with each request. The 5 s are the report's alarm, not a measurement."
    ),
    rows=rows,
    requests=200,
)
