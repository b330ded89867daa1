"""The highest rate at which requests attain their targets, by policy, on recorded traces.

    python -m benchmarks.goodput --out goodput.json [--traces DIR] [--requests N] [--only LABEL]

Each baseline gets its best static token budget, searched on the first 2,000 requests at the rate it can
just keep; `+demotion` is the same baseline told to give up early on what is lost, as `kaiseki` does.
`kaiseki -x` is `kaiseki` without one of its ideas. Every simulation is kept in the file, so that a run
that was stopped goes on where it was; use another file when the code has changed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kaiseki.core.policy import Order, Policy
from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster, search
from kaiseki.sim.clairvoyant import Clairvoyant
from kaiseki.sim.run import Case, simulate
from kaiseki.work import classes
from kaiseki.work.shaping import Shape
from kaiseki.work.traces.opening import load

TARGETS = (0.9, 0.99)
SEEDS = 5
STEP, STEPS = 1.25, 3
"""The final search: within 3 %."""
BASELINES = ("fcfs", "priority", "edf", "sarathi")
OTHERS = ("static", "orca", "srpt", "vtc", "urgency-match")


@dataclass(frozen=True)
class Trace:
    """A trace, the fleet that it is simulated on, and the scale of its clock from which to search."""

    file: str
    cluster: str
    router: str
    start: float


TRACES = {
    "azure": Trace("azure_conv_2023.csv", "70b-8xa100", "least-work", 0.6),
    "mooncake": Trace("mooncake_conversation.jsonl", "70b-8xh100", "least-work", 0.3),
}


def entries() -> dict[str, Policy]:
    """Policies by the label under which they are reported; the order is that of what matters most."""
    ours = policy("kaiseki")
    found = {"kaiseki": ours}
    for name in BASELINES:
        found[name] = policy(name)
    for name in BASELINES:
        found[f"{name} +demotion"] = policy(name, gives_up=True)
    found["clairvoyant"] = Clairvoyant()
    found |= {
        "kaiseki -demotion": replace(ours, gives_up=False),
        "kaiseki -time bound": replace(ours, time_bound=False, budget_tokens=search.MIDDLE),
        "kaiseki -fair shares": replace(ours, fair=False),
        "kaiseki -purchases": replace(ours, buys=False),
        "kaiseki -urgency": replace(ours, order=Order.DECODES_FIRST),
    }
    return found | {name: policy(name) for name in OTHERS}


class Kept:
    """Simulates, or looks up what was simulated before."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self.document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.document.setdefault("runs", {})
        self.document.setdefault("results", {})
        self.label = ""

    def __call__(self, case: Case, made: Policy) -> dict[str, Any]:
        count = case.shape.requests
        key = (
            f"{self._name}|{self.label}|{made.budget_tokens}|{count}|{case.seed}|{case.shape.rate_scale:.6f}"
        )
        runs = self.document["runs"]
        if key not in runs:
            runs[key] = _figures(simulate(case, made))
            self.save()
            print(f"{key}: {runs[key]['attainment']:.4f} in {runs[key]['wall_s']:.0f} s", flush=True)
        found: dict[str, Any] = runs[key]
        return found

    def save(self) -> None:
        """Written beside and renamed, so that a stop at any time leaves a whole file."""
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self.document, indent=1))
        os.replace(beside, self._path)


def _figures(run: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's figures that is kept."""
    whole = (
        "attainment",
        "offered_rps",
        "goodput_rps",
        "demoted",
        "gpu_utilisation",
        "preemptions",
        "wall_s",
    )
    part = ("requests", "attainment", "ttft_ms", "tbt_ms")
    kept = {key: run[key] for key in (*whole, *part)}
    for of in ("classes", "tenants"):
        kept[of] = {name: {key: found[key] for key in part} for name, found in run[of].items()}
    return kept


def limit(
    case: Case, made: Policy, target: float, run: Kept, start: float, few: int, seeds: int
) -> dict[str, Any]:
    """The highest rate of one policy: its budget on `few` requests, its rate on all, other seeds there."""
    best, short = search.best_at_limit(case, made, target, run, start, few)
    rate = search.highest_rate(case, best, target, run, short.low or start, STEP, STEPS)
    if rate.rps is None:
        return {"rps": None, "budget_tokens": best.budget_tokens}
    there = case.scaled(rate.low)
    found = [run(replace(there, seed=seed), best) for seed in range(1, seeds + 1)]
    attained = [one["attainment"] for one in found]
    return {
        "rps": rate.rps,
        "low": rate.low,
        "high": rate.high,
        "budget_tokens": best.budget_tokens,
        "demotion": best.gives_up,
        "attainment": {"seeds": attained, "min": min(attained), "max": max(attained)},
        "classes": {name: one["attainment"] for name, one in found[0]["classes"].items()},
        "tenants": {name: one["attainment"] for name, one in found[0]["tenants"].items()},
    }


def case_of(trace: Trace, folder: Path, requests: int | None) -> Case:
    """The load on its fleet."""
    described = cluster.load(trace.cluster)
    batches = list(load(folder / trace.file, "auto", Shape(requests=requests)))
    return Case(
        stream=lambda shape: shape.apply(batches),
        plan=classes.load("mixed"),
        fleet=cluster.fleet(described),
        router=trace.router,
        links=described.links,
        shape=Shape(requests=requests),
    )


def rows(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Label, then for each target: budget, rate, that of `kaiseki` over it, attained at that of `kaiseki`."""
    ours = results.get("kaiseki", {})
    for label, found in results.items():
        row = [label]
        for key in (f"at_{target * 100:g}" for target in TARGETS):
            one, best = found.get(key, {}), ours.get(key, {}).get("rps")
            rps, there = one.get("rps"), found.get(f"where_kaiseki_{key}")
            row += [
                str(one.get("budget_tokens") or ""),
                ("none" if one else "") if rps is None else f"{rps:.2f}",
                "" if rps is None or best is None else f"{best / rps:.2f}",
                "" if there is None else f"{there:.1%}",
            ]
        yield tuple(row)


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("goodput.json"))
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--trace", action="append", choices=TRACES)
    parser.add_argument("--requests", type=int, help="only the first so many; whole traces otherwise")
    parser.add_argument("--only", action="append", help="a label; may be repeated")
    parser.add_argument("--target", action="append", type=float, help="attainment; 0.9 and 0.99 otherwise")
    parser.add_argument(
        "--few", type=int, default=search.SEARCH_REQUESTS, help="requests to find a budget on"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="class assignments at the rate found")
    parser.add_argument(
        "--there", action="store_true", help="no search: what each attains at the limit found for kaiseki"
    )
    arguments = parser.parse_args()
    for name in arguments.trace or TRACES:
        case = case_of(TRACES[name], arguments.traces, arguments.requests)
        run = Kept(arguments.out, name)
        results = run.document["results"].setdefault(name, {})
        for target in arguments.target or TARGETS:
            key = f"at_{target * 100:g}"
            for label, made in entries().items():
                if arguments.only and label not in arguments.only:
                    continue
                run.label = label
                if not arguments.there:
                    start = TRACES[name].start
                    found = limit(case, made, target, run, start, arguments.few, arguments.seeds)
                    results.setdefault(label, {})[key] = found
                    print(f"== {name} {label} at {target:.0%}: {found['rps']}", flush=True)
                elif results.get("kaiseki", {}).get(key, {}).get("rps") is not None:
                    if search.has_budget(made):
                        made = replace(made, budget_tokens=search.MIDDLE)
                    there = run(case.scaled(results["kaiseki"][key]["low"]), made)
                    results.setdefault(label, {})["where_kaiseki_" + key] = there["attainment"]
                run.save()
        print_table(name, results)


def print_table(name: str, results: dict[str, Any], write: Callable[[str], None] = print) -> None:
    """As in docs/goodput.md."""
    write(f"\n{name}\n")
    write("| policy |" + " budget | rate | ratio | there |" * len(TARGETS))
    write("|---|" + "---|---|---|---|" * len(TARGETS))
    for row in rows(results):
        write(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
