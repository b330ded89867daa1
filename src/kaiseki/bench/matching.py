"""How far the matching of chunks to cards stays behind the optimum, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kaiseki.bench.matching_exact import Best, Instance, solve
from kaiseki.core.decision import I32
from kaiseki.core.matching import assign
from kaiseki.models.progress import Progress, quiet
from kaiseki.observe.percentiles import percentiles

FAMILIES = {"small-plain": "exact", "small-affinity": "exact", "large-plain": "lp", "large-affinity": "lp"}
"""Files of instances, and what each is compared with: the exact optimum takes too long for large ones."""
INSTANCES = Path(__file__).resolve().parents[3] / "benchmarks" / "instances" / "matching"
"""In the checkout; an installed package does not carry them."""
REPEATS = 7
TARGET_GAP = 0.03
"""What the median gap of each family may be."""


class NoInstances(Exception):
    """The instances are not where they were looked for."""


def load(family: str, folder: Path = INSTANCES) -> dict[int, Instance]:
    """The instances of one family by seed.

    Raises:
        NoInstances: there are none in this folder.
    """
    path = folder / f"{family}.npz"
    try:
        with np.load(path) as arrays:
            names = ("value", "time", "kv", "time_of_card", "kv_of_card")
            seeds = arrays["seed"].tolist()
            stacked = [arrays[name].astype(np.float64) for name in names]
    except FileNotFoundError as error:
        raise NoInstances(
            f"no instances in {folder}: they come with the source, so run this from a checkout, "
            "or name the folder benchmarks/instances/matching of one with --instances"
        ) from error
    except (OSError, KeyError, ValueError) as error:
        raise NoInstances(f"{path} cannot be read: {error}") from error
    return {seed: Instance(*one) for seed, *one in zip(seeds, *stacked, strict=True)}


def run(folder: Path = INSTANCES, repeats: int = REPEATS, progress: Progress = quiet) -> dict[str, Any]:
    """Everything that `kaiseki bench matching` finds.

    Args:
        folder: of the instances.
        repeats: how often each is matched; the median time counts.
        progress: told what is being done.

    Raises:
        NoInstances: see `load`.
    """
    families = {family: load(family, folder) for family in FAMILIES}
    cases: list[dict[str, Any]] = []
    for number, (family, instances) in enumerate(families.items()):
        progress(f"matching, {family}", number, len(families))
        for seed, instance in instances.items():
            cases.append({"family": family, "seed": seed} | measure(instance, FAMILIES[family], repeats))
    summaries = [_summary(family, [c for c in cases if c["family"] == family]) for family in families]
    return {"target_gap": TARGET_GAP, "families": summaries, "cases": cases}


def match(instance: Instance) -> I32:
    """Card of each chunk, as the scheduler would choose it; nothing runs yet."""
    free = np.full(instance.value.shape[0], -1, np.int32)
    return assign(instance.value, instance.time, instance.kv, instance.room_time, instance.room_kv, free)


def worth_of(instance: Instance, cards: I32) -> float:
    """What an assignment is worth."""
    placed = np.flatnonzero(cards >= 0)
    return float(instance.value[placed, cards[placed]].sum())


def measure(instance: Instance, reference: str, repeats: int = REPEATS) -> dict[str, Any]:
    """One case: the gap to the reference ("exact" or "lp"), times of both, and how tight it is.

    Times are of this thread's CPU, in us: what else the machine does is not in them.
    """
    cards = match(instance)
    times = []
    for _ in range(repeats):
        begin = time.thread_time_ns()
        match(instance)
        times.append(time.thread_time_ns() - begin)
    begin = time.process_time_ns()
    best = solve(instance, whole=reference == "exact")
    exact_ns = time.process_time_ns() - begin
    relaxed = best if reference == "lp" else solve(instance, whole=False)
    chunks, on = instance.value.shape
    return {
        "chunks": chunks,
        "cards": on,
        "gap": 1.0 - worth_of(instance, cards) / best.worth,
        "reference": reference,
        "greedy_us": float(np.median(times)) / 1e3,
        "exact_us": exact_ns / 1e3,
        "admitted": float((cards >= 0).mean()),
        "best_admitted": float(best.shares.sum()) / chunks,
        "slack": slack(instance, relaxed),
    }


def slack(instance: Instance, relaxed: Best) -> dict[str, float]:
    """Part of all cards' time and KV that the LP leaves unused: 0 where every card's capacity binds.

    What the exact optimum leaves says less: a card that holds four chunks is never quite full.
    """
    unused = {}
    for name, takes, room in (
        ("time", instance.time, instance.room_time),
        ("kv", instance.kv, instance.room_kv),
    ):
        unused[name] = 1.0 - float((takes * relaxed.shares).sum() / room.sum())
    return unused


def _summary(family: str, cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    gap = percentiles([case["gap"] for case in cases])
    first = cases[0]
    return {
        "family": family,
        "instances": len(cases),
        "chunks": first["chunks"],
        "cards": first["cards"],
        "reference": first["reference"],
        "gap": gap,
        "greedy_us": percentiles([case["greedy_us"] for case in cases]),
        "exact_us": percentiles([case["exact_us"] for case in cases]),
        "admitted": float(np.median([case["admitted"] for case in cases])),
        "slack": {name: float(np.median([case["slack"][name] for case in cases])) for name in first["slack"]},
        "ok": gap["p50"] <= TARGET_GAP,
    }
