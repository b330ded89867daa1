"""Scheduling by urgency and matching: more time to decide against earlier first tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster as clusters
from kaiseki.sim.experiments.rows import Experiment, Row, change, percent
from kaiseki.sim.experiments.setting import case_on, generated, with_pools
from kaiseki.sim.run import simulate
from kaiseki.work.catalogue import azure_conversation

PLAIN_MS, MATCHED_MS = 0.08, 0.35
"""Time to decide, as reported."""
BUDGET = 256
RPS = 1.2


def rows(requests: int) -> Iterator[Row]:
    """Each pays for its decisions in every step."""
    fleet, workload = clusters.load("70b-4xa100"), azure_conversation(RPS)
    found = {}
    for name, host_ms in (("fcfs", PLAIN_MS), ("urgency-match", MATCHED_MS), ("kaiseki", MATCHED_MS)):
        slower = with_pools(fleet, host_ms=host_ms)
        case = case_on(slower, generated(workload), "mixed", requests)
        made = policy(name)
        found[name] = simulate(case, made if name == "kaiseki" else replace(made, budget_tokens=BUDGET))
    plain = found["fcfs"]
    for name in ("urgency-match", "kaiseki"):
        reported = -47.5 if name == "urgency-match" else None
        for cls in ("interactive", "all"):
            new, old = (run if cls == "all" else run["classes"][cls] for run in (found[name], plain))
            value = change(new["ttft_ms"]["p99"], old["ttft_ms"]["p99"])
            yield Row(f"{name}: TTFT P99 of {cls}, change in %", value, reported if cls == "all" else None)
    for name, run in found.items():
        yield Row(f"{name}: attained, %", percent(run["attainment"]))


EXPERIMENT = Experiment(
    title="Urgency and matching: first tokens earlier for a slower scheduler",
    setting=(
        f"`70b-4xa100` (TP 2, PP 2), lengths of the Azure conversations, {RPS:g} requests/s, a budget of "
        f"{BUDGET} tokens; `fcfs` with {PLAIN_MS:g} ms of deciding per step, `urgency-match` and "
        f"`kaiseki` with {MATCHED_MS:g} ms."
    ),
    differs=(
        "Reported are 35 to 60 % less, of which this is the middle, for an unnamed load. An order moves "
        "lateness from one request to another, so the change over all depends on where the load stands to "
        "capacity."
    ),
    rows=rows,
)
