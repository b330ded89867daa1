"""The findings as a document: medians over seeds, the best budget of each baseline, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kaiseki.demo.measure import DEADLINE_FACTOR
from kaiseki.demo.prompts import INTERACTIVE
from kaiseki.demo.run import BASELINES, OURS, Findings, Options, reason_for

LEAST_INTERACTIVE = 0.95
LEAST_GAIN = 0.20
LEAST_RATE = 0.95


def document(found: Findings, options: Options) -> dict[str, Any]:
    """The JSON of `kaiseki demo`."""
    best = {policy: best_budget(runs) for policy, runs in found.figures.items()}
    policies = {policy: _policy(runs, best[policy]) for policy, runs in found.figures.items()}
    seeds = [
        {
            "seed": seed,
            "load": _load(found, index),
            "policies": {
                policy: runs[best[policy]][index] | {"budget_tokens": best[policy]}
                for policy, runs in found.figures.items()
            },
        }
        for index, seed in enumerate(options.seeds)
    ]
    checks = verdicts(policies)
    return {
        "policies": policies,
        "load": median_of([entry["load"] for entry in seeds]),
        "measured": asdict(found.measured),
        "deadline_rule": f"{DEADLINE_FACTOR:g} times the lone time of the median batch request",
        "budget_choice": "best of all by attainment"
        if options.full
        else reason_for(found.measured, found.budget),
        "verdicts": checks,
        "ok": all(check["ok"] for check in checks),
        "explained": found.explained,
        "seeds": seeds,
        "wall_s": round(found.wall_s, 1),
    }


def best_budget(runs: Mapping[int | None, Sequence[Mapping[str, Any]]]) -> int | None:
    """The budget with the most attained requests, in the median over seeds."""
    return max(runs, key=lambda budget: float(np.median([run["attainment"] for run in runs[budget]])))


def verdicts(policies: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The four targets: what was reached, what was wanted, and whether that is enough."""
    ours, fcfs, priority = policies[OURS], policies["fcfs"], policies["priority"]
    mine = ours["classes"][INTERACTIVE]["attainment"]
    gain = mine - fcfs["classes"][INTERACTIVE]["attainment"]
    fastest = max(policies[policy]["output_tokens_per_s"] for policy in BASELINES)
    rate = ours["output_tokens_per_s"] / fastest if fastest else 0.0
    return [
        _verdict("interactive attainment of kaiseki", mine, LEAST_INTERACTIVE, mine >= LEAST_INTERACTIVE),
        _verdict("interactive attainment above fcfs", gain, LEAST_GAIN, gain >= LEAST_GAIN),
        _verdict(
            "requests attained overall, above priority",
            ours["attained"],
            priority["attained"],
            ours["attained"] > priority["attained"],
        ),
        _verdict("output tokens/s over the faster baseline's", rate, LEAST_RATE, rate >= LEAST_RATE),
    ]


def median_of(values: Sequence[Any]) -> Any:
    """Documents of one shape merged into one: the median of each number, None where there is none."""
    if isinstance(values[0], dict):
        return {key: median_of([value[key] for value in values]) for key in values[0]}
    known = [value for value in values if value is not None]
    if not known:
        return None
    return known[0] if len(known) == 1 else float(np.median(known))


def _policy(runs: Mapping[int | None, Sequence[dict[str, Any]]], best: int | None) -> dict[str, Any]:
    figures: dict[str, Any] = median_of(runs[best]) | {"budget_tokens": best}
    if len(runs) > 1:
        tried = [{"budget_tokens": budget, **_short(median_of(each))} for budget, each in runs.items()]
        figures["budgets"] = tried
    return figures


def _short(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {key: figures[key] for key in ("attained", "attainment", "output_tokens_per_s")}


def _load(found: Findings, index: int) -> dict[str, Any]:
    load = found.loads[index]
    return {
        "requests": len(load.arrivals),
        "seconds": load.seconds,
        "offered_rps": len(load.arrivals) / load.seconds,
        "sustainable_rps": len(load.arrivals) / load.seconds / load.offered_ratio,
        "offered_ratio": load.offered_ratio,
        "interactive_share": load.interactive_share,
    }


def _verdict(target: str, reached: float, wanted: float, ok: bool) -> dict[str, Any]:
    return {"target": target, "reached": reached, "wanted": wanted, "ok": bool(ok)}
