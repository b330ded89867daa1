"""How small should chunks be? With what deciding costs, by the chunk and by the slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kaiseki.cost.deployment import HostTime
from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster as clusters
from kaiseki.sim.cluster import Replica
from kaiseki.sim.experiments.rows import Experiment, Row, over, percent
from kaiseki.sim.experiments.setting import case_on, generated
from kaiseki.sim.run import Case, simulate
from kaiseki.work.catalogue import azure_conversation

QUANTA = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPORTED_SHARE = {16: 8.0, 1: 45.0}
REPORTED_BUSY = {16: 75.0, 1: 78.0}
PER_CHUNK_US = 150.0
"""Of a scheduler that decides about each chunk: what 8 % of the time is at 16 tokens and 8,600 tokens/s."""
PER_SLOT_US = 300.0
"""Of ours, for a slot with some dozens of running requests: `kaiseki bench decide`."""
RPS = 6.0
"""More than the fleet can do, so that what is left of it shows in tokens/s."""


def rows(requests: int) -> Iterator[Row]:
    """The grid of prompt chunks from 1 to 512 tokens, twice."""
    chunked = {q: _run(requests, q, HostTime(per_token_us=PER_CHUNK_US / q)) for q in QUANTA}
    slotted = {q: _run(requests, q, HostTime(base_us=PER_SLOT_US)) for q in QUANTA}
    for q in QUANTA:
        found = chunked[q]
        share = found["host_share"]
        yield Row(f"decided by the chunk, {q} tokens: scheduler's share, %", share, REPORTED_SHARE.get(q))
        yield Row(f"decided by the chunk, {q} tokens: cards busy, %", found["busy"], REPORTED_BUSY.get(q))
        yield Row(f"decided by the chunk, {q} tokens: tokens/s", found["output_tokens_per_s"])
    one, sixteen = chunked[1], chunked[16]
    ratio = over(one["output_tokens_per_s"], sixteen["output_tokens_per_s"])
    yield Row("decided by the chunk: tokens/s at 1 over 16", ratio, 0.78)
    for q in QUANTA:
        found = slotted[q]
        yield Row(f"decided by the slot, {q} tokens: scheduler's share, %", found["host_share"])
        yield Row(f"decided by the slot, {q} tokens: tokens/s", found["output_tokens_per_s"])
        yield Row(f"decided by the slot, {q} tokens: attained, %", percent(found["attainment"]))


def _run(requests: int, quantum: int, host: HostTime) -> dict[str, Any]:
    """Figures, with the host's part of the time on top."""
    workload = azure_conversation(RPS)
    case = case_on(clusters.load("70b-8xa100"), generated(workload), "mixed", requests)
    case = replace(case, fleet=[_hosted(one, host) for one in case.fleet]).with_settings(
        quantum_tokens=quantum
    )
    found = simulate(case, policy("kaiseki"))
    host_ns = host.base_us * 1e3 * found["iterations"] + host.per_token_us * 1e3 * _tokens(case)
    share = host_ns / 1e9 / found["simulated_s"]
    busy = found["gpu_utilisation"] - share
    return found | {"host_share": 100.0 * share, "busy": 100.0 * busy}


def _hosted(replica: Replica, host: HostTime) -> Replica:
    return Replica(replica.pool, replace(replica.deployment, host=host))


def _tokens(case: Case) -> int:
    """Prompt and output tokens of a load without shared prefixes."""
    return sum(int(b.prompt_tokens.sum() + b.output_tokens.sum()) for b in case.stream(case.shape))


EXPERIMENT = Experiment(
    title="Chunks of 1 to 512 tokens: what does deciding cost, and what does it take from the cards?",
    setting=(
        f"`70b-8xa100`, lengths of the Azure conversations, {RPS:g} requests/s, more than it can do. Once "
        f"a scheduler that decides about every chunk and takes {PER_CHUNK_US:g} us for each, once one "
        f"that decides about a slot and takes {PER_SLOT_US:g} us, as ours does. Deciding does not overlap "
        "the step."
    ),
    differs=(
        "Both scales are modelled. Where each chunk is a decision the cost is inverse to the chunk; the "
        "report's 45 % at one token is less than that, so its decisions must have been batched in part. Here "
        "a chunk's length is a result of the slot's bound, so what a slot costs does not depend on the grid."
    ),
    rows=rows,
    requests=200,
)
