"""What a slot costs: arrivals, `decide` and `apply`, with all that belongs to them, and without a model.

Included are block allocation and commit, digests of arriving prompts, records and cutoffs as drained into
the history, and metric bins. Not included is what hands tokens to clients.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kaiseki.bench.profiling import profile_slots
from kaiseki.bench.replica import Replica, SlotCost
from kaiseki.bench.scheduler_peer import SchedulerPeer, start_scheduler_peer
from kaiseki.core.policy import Policy
from kaiseki.models.progress import Progress, quiet
from kaiseki.observe.percentiles import percentiles
from kaiseki.policies.registry import load

SLOTS = 400
WARM_UP = 100
"""Slots before anything is measured: the requests whose targets passed while the load was set up are
demoted in these, at most `SchedulerSettings.window` per slot."""
ROUNDS = 5
"""Into which the slots of the main case are divided, so that a peer takes turns with it."""
PEER_SHARE = 10
"""A peer does one slot where we do so many, as it may take a hundred times as long."""

TARGET_P50_US = 250.0
TARGET_P99_US = 1_000.0
TARGET_GROWTH = 1.5
TARGET_DECISIONS_PER_S = 1_000.0
TARGET_EXPLAIN_MS = 50.0
EXPLAINED = 20
"""How often one of those that wait is explained."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are.

    Attributes:
        decodes: running requests of the cases in which nothing waits.
        running, waiting, churn: of the main case; `churn` requests arrive, and as many end, in each slot.
        queues: how many wait in the two cases that are compared; as many run as in the main case.
        replicas, each: how many schedulers, and how many requests run on each of them.
        slots: how many are measured of each case.
        warm_up: how many go before.
    """

    decodes: tuple[int, ...] = (64, 256, 1024, 4096)
    running: int = 1024
    waiting: int = 4096
    churn: int = 4
    queues: tuple[int, int] = (1_000, 1_000_000)
    replicas: int = 8
    each: int = 128
    slots: int = SLOTS
    warm_up: int = WARM_UP


def run(
    policy: str = "kaiseki",
    peer: str | None = None,
    profile: bool = False,
    sizes: Sizes | None = None,
    progress: Progress = quiet,
) -> dict[str, Any]:
    """Everything that `kaiseki bench decide` finds.

    Args:
        policy: name of a policy.
        peer: what to compare with, see `start_scheduler_peer`.
        profile: also say where the time of the main case goes.
        sizes: of the cases.
        progress: told what is being done.

    Raises:
        UnknownPolicy: there is no such policy.
        ValueError: the peer's specification is not understood.
        PeerFailed: the peer did not start, or broke.
    """
    made, s = load(policy), sizes or Sizes()
    steps = len(s.decodes) + 4
    cases = []
    explain_ms: dict[str, float] = {}
    for n, running in enumerate(s.decodes):
        progress(f"{running} decodes", n, steps)
        cases.append(decoding(made, running, s))
    progress(f"{s.running} running, {s.waiting} waiting", len(s.decodes), steps)
    main, against, where = measure_main(made, peer, profile, s)
    cases.append(main)
    queued, built_s = [], []
    for n, waiting in enumerate(s.queues):
        progress(f"{waiting} waiting", len(s.decodes) + 1 + n, steps)
        case, took, explain_ms = crowded(made, waiting, s)
        queued.append(case)
        built_s.append(took)
    progress(f"{s.replicas} replicas", steps - 1, steps)
    many = replicated(made, s)
    growth = queued[1]["total_us"]["p50"] / queued[0]["total_us"]["p50"]
    return {
        "policy": policy,
        "clock": "thread CPU time",
        "cases": [*cases, *queued, many],
        "us_per_running_request": _slope(cases[: len(s.decodes)]),
        "queue_growth_1k_to_1m": growth,
        "queue_built_s": built_s[1],
        "explain_ms": explain_ms,
        "peer": against,
        "profile": where,
        "targets": _targets(main["total_us"], growth, many["decisions_per_s"], explain_ms["max"]),
    }


def decoding(policy: Policy, running: int, sizes: Sizes) -> dict[str, Any]:
    """So many requests decode, nothing waits, nothing arrives or ends."""
    replica = Replica(policy, running, sizes.slots + sizes.warm_up)
    replica.fill(running)
    with _settled():
        _slots(replica, 0, sizes.warm_up)
        return _case("decodes", [replica], 0, _slots(replica, 0, sizes.slots))


def measure_main(
    policy: Policy, peer: str | None, profile: bool, sizes: Sizes
) -> tuple[dict[str, Any], dict[str, Any] | None, list[dict[str, Any]]]:
    """The main case, a peer under the same load in turn with it, and where the time goes."""
    replica = Replica(policy, sizes.running, sizes.slots + sizes.warm_up)
    replica.fill(sizes.running)
    replica.wait(sizes.waiting)
    _slots(replica, sizes.churn, sizes.warm_up)
    other = None if peer is None else start_scheduler_peer(peer, sizes.running, sizes.waiting, sizes.churn)
    try:
        costs = _take_turns(replica, other, sizes)
    finally:
        if other is not None:
            other.shutdown()
    case = _case("main", [replica], sizes.churn, costs)
    against = None if other is None else other.compare(case)
    where = profile_slots(replica, sizes.churn, sizes.slots) if profile else []
    return case, against, where


def _take_turns(replica: Replica, other: SchedulerPeer | None, sizes: Sizes) -> list[SlotCost]:
    each = -(-sizes.slots // ROUNDS)
    costs: list[SlotCost] = []
    with _settled():
        for _ in range(ROUNDS):
            costs += _slots(replica, sizes.churn, each)
            if other is not None:
                other.slots(-(-each // PEER_SHARE))
    return costs


def crowded(policy: Policy, waiting: int, sizes: Sizes) -> tuple[dict[str, Any], float, dict[str, float]]:
    """So many wait that can wait for long, or the queue's length would also set how many are given up.

    Also returns how long it took to have them wait, seconds of wall-clock time, and how long it takes to
    explain one of them after all the slots, ms of thread CPU time.
    """
    replica = Replica(policy, sizes.running, sizes.slots + sizes.warm_up)
    replica.fill(sizes.running)
    begin = time.perf_counter()
    replica.crowd(waiting)
    took = time.perf_counter() - begin
    one = replica.wait_among_them()
    with _settled():
        _slots(replica, sizes.churn, sizes.warm_up)
        case = _case("queue", [replica], sizes.churn, _slots(replica, sizes.churn, sizes.slots))
        explained = percentiles([replica.explain(one)[1] / 1e6 for _ in range(EXPLAINED)])
    return case, took, explained


def replicated(policy: Policy, sizes: Sizes) -> dict[str, Any]:
    """Several schedulers in turn on one thread, each with a queue of its own; one request comes per slot."""
    replicas = [
        Replica(policy, sizes.each, sizes.slots + sizes.warm_up, seed) for seed in range(sizes.replicas)
    ]
    for replica in replicas:
        replica.fill(sizes.each)
        replica.wait(sizes.waiting // sizes.replicas)
        _slots(replica, 1, sizes.warm_up)
    with _settled():
        turns = max(sizes.slots // sizes.replicas, 1)
        costs = [replica.slot(1) for _ in range(turns) for replica in replicas]
    return _case("replicas", replicas, 1, costs)


def _slots(replica: Replica, churn: int, many: int) -> list[SlotCost]:
    return [replica.slot(churn) for _ in range(many)]


@contextmanager
def _settled() -> Iterator[None]:
    """What was made so far is left out of garbage collections, as a server does once it is set up."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _case(kind: str, replicas: Sequence[Replica], churn: int, costs: Sequence[SlotCost]) -> dict[str, Any]:
    """Figures of one case. `running` and `waiting` are of each replica, at the end, the first one's."""
    first = replicas[0].scheduler
    total = percentiles([c.total / 1e3 for c in costs])
    arrived = [c.submit / c.arrivals / 1e3 for c in costs if c.arrivals]
    return {
        "kind": kind,
        "replicas": len(replicas),
        "running": first.table.running_count + churn,  # as many end last as come next
        "waiting": len(first.waiting),
        "churn": churn,
        "slots": len(costs),
        "chunks": sum(c.chunks for c in costs) / len(costs),
        "decide_us": percentiles([c.decide / 1e3 for c in costs]),
        "apply_us": percentiles([c.apply / 1e3 for c in costs]),
        "slot_us": percentiles([(c.decide + c.apply) / 1e3 for c in costs]),
        "submit_us": percentiles(arrived) if arrived else None,
        "total_us": total,
        "decisions_per_s": 1e6 / total["mean"],
    }


def _slope(cases: Sequence[dict[str, Any]]) -> float:
    """Us per running request, from the smallest to the largest of the cases in which nothing waits."""
    few, many = cases[0], cases[-1]
    more = many["running"] - few["running"]
    return float((many["total_us"]["p50"] - few["total_us"]["p50"]) / more) if more else 0.0


def _targets(total: dict[str, float], growth: float, per_s: float, explain_ms: float) -> list[dict[str, Any]]:
    aims = (
        ("main, p50 us", total["p50"], TARGET_P50_US, True),
        ("main, p99 us", total["p99"], TARGET_P99_US, True),
        ("growth of the slot from 1 K to 1 M waiting", growth, TARGET_GROWTH, True),
        ("decisions/s of the replicas", per_s, TARGET_DECISIONS_PER_S, False),
        ("explaining one of 1 M waiting, ms", explain_ms, TARGET_EXPLAIN_MS, True),
    )
    return [
        {"name": name, "found": found, "target": aim, "ok": found <= aim if most else found >= aim}
        for name, found, aim, most in aims
    ]
