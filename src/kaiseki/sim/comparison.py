"""What changes for whom: a recording's requests as they fared, and as they would have fared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kaiseki.core.policy import Policy
from kaiseki.core.reasons import Outcome
from kaiseki.core.settings import SchedulerSettings
from kaiseki.sim.figures import request_figures
from kaiseki.sim.loop import Log
from kaiseki.sim.whatif import Fared, Recorded

RECORDED = "recorded"


def compare(recorded: Recorded, cases: Mapping[str, tuple[Policy, SchedulerSettings]]) -> dict[str, Any]:
    """The document of `kaiseki replay`.

    Args:
        recorded: the recording, replayed.
        cases: what else to try, by name.
    """
    done = recorded.replayed
    mismatches = [] if done.mismatch is None else [{"slot": done.mismatch[0], "array": done.mismatch[1]}]
    document: dict[str, Any] = {
        "decisions": done.decisions,
        "first_slot": done.first_slot,
        "last_slot": done.last_slot,
        "mismatches": mismatches,
        "policies": {RECORDED: _figures(recorded, recorded.fared)},
        "changes": [],
    }
    for name, (policy, settings) in cases.items():
        fared = recorded.under(policy, settings)
        document["policies"][name] = _figures(recorded, fared) | {"budget_tokens": policy.budget_tokens}
        document["changes"] += _changes(recorded, name, fared)
    return document


def _figures(recorded: Recorded, fared: Fared) -> dict[str, Any]:
    requests = {a.request.id: a for a in recorded.asked if a.counted}
    times = [a.at_ns for a in requests.values()] or [0]
    log = Log(first_ns=min(times), last_ns=max(times))
    log.endings = [(requests[name].request, e) for name, e in fared.endings.items()]
    log.refusals = [(requests[name].request, r) for name, r in fared.refusals.items()]
    for tokens in fared.tokens:
        later = tokens[~tokens["first"]]
        log.gaps.append(later["ns"])
        log.gap_cls.append(later["cls"])
        log.gap_tenant.append(later["tenant"])
    core = recorded.replayed.scheduler
    figures = request_figures(log, [c.name for c in core.life.classes], core.fairness.names)
    return figures | {"iterations": len(fared.tokens)}


def _changes(recorded: Recorded, policy: str, fared: Fared) -> list[dict[str, Any]]:
    """Requests that would have ended otherwise, or met their targets where they did not, or the reverse."""
    found = []
    for asked in recorded.asked:
        name = asked.request.id
        before, after = _fate(recorded.fared, name), _fate(fared, name)
        if not asked.counted or before is None or after is None:
            continue
        if (before["outcome"], before["attained"]) != (after["outcome"], after["attained"]):
            found.append(
                {
                    "request": name, "policy": policy, "tenant": asked.request.tenant,
                    "class": asked.request.cls.name, "before": before, "after": after,
                }
            )  # fmt: skip
    return found


def _fate(fared: Fared, name: str) -> dict[str, Any] | None:
    if name in fared.refusals:
        outcome = Outcome.REFUSED.label
        return {"outcome": outcome, "attained": False, "ttft_ms": None, "e2e_ms": None, "output_tokens": 0}
    e = fared.endings.get(name)
    if e is None:
        return None
    first = None if e.first_token_ns < 0 else round((e.first_token_ns - e.arrival_ns) / 1e6, 3)
    return {
        "outcome": e.outcome.label,
        "attained": e.attained,
        "ttft_ms": first,
        "e2e_ms": round((e.ended_ns - e.arrival_ns) / 1e6, 3),
        "output_tokens": e.outputs,
    }
