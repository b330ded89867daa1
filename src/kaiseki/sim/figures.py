"""From what happened to the figures that the command line promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kaiseki.core.decision import F64, I32
from kaiseki.core.reasons import Outcome
from kaiseki.core.requests import Request
from kaiseki.observe.percentiles import percentiles
from kaiseki.sim.cluster import Training
from kaiseki.sim.links import Link
from kaiseki.sim.loop import Log
from kaiseki.sim.replica import SimReplica
from kaiseki.sim.training import Step

COUNTS = (Outcome.COMPLETED, Outcome.EXPIRED, Outcome.FAILED, Outcome.CANCELLED)


def policy_figures(
    log: Log,
    replicas: Sequence[SimReplica],
    links: Mapping[tuple[str, str], Link],
    classes: Sequence[str],
    tenants: Sequence[str],
    wasted: float | None = None,
) -> dict[str, Any]:
    """Figures of one policy, whole and by class and tenant.

    Args:
        log: what happened.
        replicas: on which.
        links: between their pools, by these' names.
        classes, tenants: their names by index; those without requests are left out.
        wasted: part of the KV in use that held no token.
    """
    whole = request_figures(log, classes, tenants)
    whole |= _fleet_figures(log, replicas) | {"fragmentation": wasted}
    whole["pools"] = _pool_figures(log, replicas)
    whole["links"] = {f"{source}>{target}": _link_figures(link) for (source, target), link in links.items()}
    whole["link_peak_gb_s"] = max((link.peak_gb_s for link in links.values()), default=None)
    return whole


def request_figures(log: Log, classes: Sequence[str], tenants: Sequence[str]) -> dict[str, Any]:
    """How requests fared, whole and by class and tenant; see `policy_figures`."""
    span_s = max(log.last_ns - log.first_ns, 1) / 1e9
    seen = {request.cls.name for request, _ in (*log.endings, *log.refusals)}
    senders = {request.tenant for request, _ in (*log.endings, *log.refusals)}
    gaps, cls, tenant = _gaps(log)
    whole = _figures(log, gaps, span_s, lambda request: True)
    whole["classes"] = {
        name: _figures(log, gaps[cls == i], span_s, partial(_has_class, name))
        for i, name in enumerate(classes)
        if name in seen
    }
    whole["tenants"] = {
        name: _figures(log, gaps[tenant == i], span_s, partial(_has_tenant, name))
        for i, name in enumerate(tenants)
        if name in senders
    }
    return whole


def _has_class(name: str, request: Request) -> bool:
    return request.cls.name == name


def _has_tenant(name: str, request: Request) -> bool:
    return request.tenant == name


def _gaps(log: Log) -> tuple[F64, I32, I32]:
    """All gaps, ms, with the indices of their classes and tenants."""
    if not log.gaps:
        return np.zeros(0), np.zeros(0, np.int32), np.zeros(0, np.int32)
    return np.concatenate(log.gaps) / 1e6, np.concatenate(log.gap_cls), np.concatenate(log.gap_tenant)


def _figures(log: Log, gaps_ms: F64, span_s: float, mine: Callable[[Request], bool]) -> dict[str, Any]:
    endings = [(r, e) for r, e in log.endings if mine(r)]
    refused = sum(mine(r) for r, _ in log.refusals)
    counts = {o.label: sum(e.outcome == o for _, e in endings) for o in COUNTS}
    met = sum(e.attained for _, e in endings)
    requests = len(endings) + refused
    counted = requests - counts[Outcome.CANCELLED.label]
    done = [e for _, e in endings if e.outcome == Outcome.COMPLETED]
    started = [e for _, e in endings if e.first_token_ns >= 0]
    admitted = [e for _, e in endings if e.admitted_ns >= 0]
    prompts = sum(e.prompt for e in admitted)
    recomputed, computed = sum(e.recomputed for e in admitted), sum(e.prompt - e.cached for e in admitted)
    return {
        "requests": requests,
        "refused": refused,
        **counts,
        "demoted": sum(e.demoted for _, e in endings),
        "attainment": met / counted if counted else None,
        "attainment_due": None,
        "goodput_rps": met / span_s,
        "output_tokens_per_s": sum(e.outputs for _, e in endings) / span_s,
        "ttft_ms": _spread([(e.first_token_ns - e.arrival_ns) / 1e6 for e in started]),
        "tbt_ms": _spread(gaps_ms),
        "e2e_ms": _spread([(e.ended_ns - e.arrival_ns) / 1e6 for e in done]),
        "queue_ms": _spread([(e.admitted_ns - e.arrival_ns) / 1e6 for e in admitted]),
        "preemptions": sum(e.preemptions for _, e in endings),
        "preempted_requests": sum(e.preemptions > 0 for _, e in endings),
        "recompute_share": recomputed / (computed + recomputed) if computed + recomputed else None,
        "prefix_hit_rate": sum(e.cached for e in admitted) / prompts if prompts else None,
    }


def _spread(values: Sequence[float] | F64) -> dict[str, float] | None:
    return percentiles(values) if len(values) else None


def _fleet_figures(log: Log, replicas: Sequence[SimReplica]) -> dict[str, Any]:
    """What belongs to the fleet rather than to requests."""
    took_ns = max(log.ended_ns - log.first_ns, 1)
    on = {r: r.on_ns(log.first_ns, log.first_ns + took_ns) for r in replicas}
    stages_ns = sum(r.description.deployment.pp * on[r] for r in replicas)
    busy = sum(r.engine.busy_ns for r in replicas)
    tokens = sum(e.outputs for _, e in log.endings)
    cards = sum(r.description.deployment.cards for r in replicas)
    idle_w = sum(
        r.description.deployment.tp * r.description.deployment.card.idle_watts
        * max(r.description.deployment.pp * on[r] - r.engine.busy_ns, 0) / 1e9
        for r in replicas
    )  # fmt: skip
    energy = sum(r.engine.energy_j for r in replicas) + idle_w
    usd = sum(
        r.description.deployment.cards * r.description.deployment.card.usd_per_hour * on[r] / 3.6e12
        for r in replicas
    )
    return {
        "gpu_utilisation": busy / max(stages_ns, 1),
        "fairness_gap": log.fairness_gap_ns / 1e9,
        "fairness_bound": log.fairness_bound_ns / 1e9,
        "energy_j_per_token": energy / tokens if tokens else None,
        "usd_per_million_output_tokens": usd / tokens * 1e6 if tokens else None,
        "iterations": sum(r.engine.iterations for r in replicas),
        "cards": cards,
        "offered_rps": (len(log.endings) + len(log.refusals)) / (max(log.last_ns - log.first_ns, 1) / 1e9),
        "simulated_s": took_ns / 1e9,
        "retried": log.retried,
        "changes": [_change(replicas[i], at_ns, what) for at_ns, what, i in log.changes],
    }


def _change(replica: SimReplica, at_ns: int, what: str) -> dict[str, Any]:
    """What was done to a replica, for reports."""
    about = replica.description
    return {"t_s": at_ns / 1e9, "what": what, "pool": about.pool.name, "replica": about.number}


def _pool_figures(log: Log, replicas: Sequence[SimReplica]) -> dict[str, dict[str, Any]]:
    """What each pool did, by name."""
    ended = max(log.ended_ns, log.first_ns + 1)
    pools: dict[str, list[SimReplica]] = {}
    for replica in replicas:
        pools.setdefault(replica.description.pool.name, []).append(replica)
    return {
        name: {
            "role": mine[0].description.pool.role,
            "replicas": len(mine),
            "cards": sum(r.description.deployment.cards for r in mine),
            "gpu_utilisation": sum(r.engine.busy_ns for r in mine)
            / max(sum(r.description.deployment.pp * r.on_ns(log.first_ns, ended) for r in mine), 1),
            "iterations": sum(r.engine.iterations for r in mine),
        }
        for name, mine in pools.items()
    }


def _link_figures(link: Link) -> dict[str, Any]:
    return {
        "transfers": len(link.moved),
        "moved_gb": sum(t.size_bytes for t in link.moved) / 1e9,
        "peak_gb_s": link.peak_gb_s,
        "most_active": link.most_active,
        "queue_ms": _spread([(t.started_ns - t.asked_ns) / 1e6 for t in link.moved]),
        "transfer_ms": _spread([(t.landed_ns - t.started_ns) / 1e6 for t in link.moved]),
    }


def training_figures(section: Training | None, steps: Sequence[Step], log: Log) -> dict[str, Any] | None:
    """How training got on, on each replica on average; None without any."""
    if section is None:
        return None
    replicas = max(len({step.replica for step in steps}), 1)
    took_s = max(log.ended_ns, 1) / 1e9
    in_time = sum(step.ended_ns - step.began_ns <= 1e9 / section.steps_per_s for step in steps)
    return {
        "steps": len(steps),
        "steps_per_s": len(steps) / replicas / took_s,
        "target_steps_per_s": section.steps_per_s,
        "in_time": in_time / len(steps) if steps else None,
    }
