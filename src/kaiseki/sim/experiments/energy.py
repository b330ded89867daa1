"""Energy and carbon per token: by load, policy and precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster as clusters
from kaiseki.sim.cluster import Replica
from kaiseki.sim.experiments.rows import Experiment, Row, percent
from kaiseki.sim.experiments.setting import case_on, generated
from kaiseki.sim.run import Case, simulate
from kaiseki.work.catalogue import azure_conversation

RATES = (0.5, 2.5)
GRAMS_PER_KWH = 400.0
"""Carbon intensity of an average grid; a setting of whoever reads the figure."""
JOULES_PER_KWH = 3.6e6


def rows(requests: int) -> Iterator[Row]:
    """The same requests at two rates, under two policies, and with weights of half the size."""
    for rps in RATES:
        workload = azure_conversation(rps)
        case = case_on(clusters.load("70b-8xh100"), generated(workload), "mixed", requests)
        for name in ("fcfs", "kaiseki"):
            yield from _of(f"{name}, bf16, {rps:g}/s", case, name)
        yield from _of(f"kaiseki, fp8, {rps:g}/s", _in_fp8(case), "kaiseki")


def _of(label: str, case: Case, name: str) -> Iterator[Row]:
    found = simulate(case, policy(name))
    joules = found["energy_j_per_token"]
    grams = None if joules is None else joules / JOULES_PER_KWH * GRAMS_PER_KWH * 1e6
    yield Row(f"{label}: J per output token", joules)
    yield Row(f"{label}: kg CO2 per million output tokens", None if grams is None else grams / 1e3)
    yield Row(f"{label}: attained, %", percent(found["attainment"]))


def _in_fp8(case: Case) -> Case:
    """The same fleet with weights in fp8; KV stays as it is."""
    fleet = []
    for one in case.fleet:
        model = one.deployment.model.model_copy(update={"weights": "fp8"})
        fleet.append(Replica(one.pool, replace(one.deployment, model=model)))
    return replace(case, fleet=fleet)


EXPERIMENT = Experiment(
    title="Energy per token: what do load, policy and precision change?",
    setting=(
        f"`70b-8xh100`, lengths of the Azure conversations, at {' and '.join(f'{r:g}' for r in RATES)} "
        f"requests/s; {GRAMS_PER_KWH:g} g CO2 per kWh, cards only."
    ),
    differs=(
        "Nothing is reported. A card that is on draws its idle power whatever it does, so energy per token "
        "depends on how full the fleet is as well as on what a step moves and computes."
    ),
    rows=rows,
)
