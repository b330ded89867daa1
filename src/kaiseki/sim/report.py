"""One HTML file with the figures of a comparison: nothing in it is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.sim import plots
from kaiseki.sim.comparing import Comparison
from kaiseki.sim.loop import Log
from kaiseki.sim.run import Case, simulate

RATES = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Of the given rate; the curve of the report is simulated at each."""
TARGET = 0.9


def write(found: Comparison, case: Case, title: str, command: str, path: Path) -> None:
    """Write the report.

    Args:
        found: what was compared.
        case: on which load and fleet; simulated at other rates as well.
        title: of the page.
        command: with which it can be made again.
        path: of the file.

    Raises:
        ImportError: `matplotlib` or `jinja2` is not installed.
        OSError: the file can't be written.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    page = Environment(autoescape=True).from_string(
        (resources.files("kaiseki.sim") / "report.html").read_text(encoding="utf-8")
    )
    policies = found.document["policies"]
    first = next(iter(policies.values()))
    text = page.render(
        title=title,
        command=command,
        load=f"{first['requests']} requests at {first['offered_rps']:.2f}/s on {first['cards']} cards.",
        target=f"{TARGET * 100:.0f}",
        rows=list(_rows(policies, "classes")),
        tenants=list(_rows(policies, "tenants")),
        fleet=list(_fleet(policies)),
        curve=Markup(plots.attainment(_curves(found, case), TARGET)),
        distributions=Markup(plots.distributions(*_distributions(found, case))),
    )
    path.write_text(text, encoding="utf-8")


def _curves(found: Comparison, case: Case) -> dict[str, list[tuple[float, float]]]:
    """(rate, attainment) of each policy."""
    curves = {}
    for name, policy in found.policies.items():
        known = {1.0: found.document["policies"][name]}
        at = {rate: known.get(rate) or simulate(case.scaled(rate), policy) for rate in RATES}
        curves[name] = [(run["offered_rps"], run["attainment"] or 0.0) for run in at.values()]
    return curves


def _distributions(
    found: Comparison, case: Case
) -> tuple[dict[str, dict[str, tuple[F64, F64]]], dict[str, tuple[float | None, float | None]]]:
    """(TTFT, gaps) in ms by class and policy, and the targets."""
    present = {name for run in found.document["policies"].values() for name in run["classes"]}
    classes = [cls for cls in case.plan.service_classes() if cls.name in present]
    names = case.plan.class_names()
    values = {
        cls.name: {
            name: (_ttft_ms(run.log, cls.name), _gaps_ms(run.log, names.index(cls.name)))
            for name, run in found.runs.items()
        }
        for cls in classes
    }
    return values, {cls.name: (_ms(cls.ttft_ns), _ms(cls.tbt_ns)) for cls in classes}


def _ttft_ms(log: Log, cls: str) -> F64:
    found = [(e.first_token_ns - e.arrival_ns) / 1e6 for r, e in log.endings if r.cls.name == cls]
    ttft: F64 = np.array(found)[[e.first_token_ns >= 0 for r, e in log.endings if r.cls.name == cls]]
    return ttft


def _gaps_ms(log: Log, cls: int) -> F64:
    if not log.gaps:
        return np.zeros(0)
    gaps: F64 = np.concatenate(log.gaps)[np.concatenate(log.gap_cls) == cls] / 1e6
    return gaps


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


def _rows(policies: Mapping[str, Any], of: str) -> Iterator[dict[str, str]]:
    """Table rows: each policy's parts, then all of it."""
    for name, run in policies.items():
        label = name
        for part, found in (*run[of].items(), ("all", run)):
            yield {
                "policy": label,
                "part": part,
                "requests": str(found["requests"]),
                "attained": _percent(found["attainment"]),
                "ttft": _spread(found["ttft_ms"], "p50", "p90", "p99"),
                "gap": _spread(found["tbt_ms"], "p50", "p99"),
                "tokens": f"{found['output_tokens_per_s']:.0f}",
            }
            label = ""


def _fleet(policies: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for name, run in policies.items():
        yield {
            "policy": name,
            "budget": "" if run["budget_tokens"] is None else str(run["budget_tokens"]),
            "busy": _percent(run["gpu_utilisation"]),
            "preempted": str(run["preempted_requests"]),
            "again": _percent(run["recompute_share"]),
            "hits": _percent(run["prefix_hit_rate"]),
            "wasted": _percent(run["fragmentation"]),
            "energy": _number(run["energy_j_per_token"]),
            "price": _number(run["usd_per_million_output_tokens"]),
            "fairness": f"{run['fairness_gap']:.2f} / {run['fairness_bound']:.2f}",
        }


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _spread(found: Mapping[str, float] | None, *which: str) -> str:
    return "" if found is None else " / ".join(f"{found[key]:.0f}" for key in which)
