"""Which requests met their targets, and the figures of a class and of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kaiseki.demo.client import Answer
from kaiseki.demo.prompts import CLASSES


@dataclass(frozen=True, slots=True)
class Targets:
    """What a class is promised, milliseconds; None where nothing is."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None
    deadline_ms: float | None = None


def attained(answer: Answer, targets: Targets) -> bool:
    """All output, undemoted, first token in time, at most max(1, 1 %) of gaps late, last token in time."""
    if not answer.finished or answer.demoted:
        return False
    if targets.ttft_ms is not None and answer.ttft_ms > targets.ttft_ms:
        return False
    if targets.tbt_ms is not None:
        gaps = answer.gaps_ms
        if int((gaps > targets.tbt_ms).sum()) > max(1, gaps.size // 100):
            return False
    return targets.deadline_ms is None or answer.e2e_ms <= targets.deadline_ms


def still_open_ms(targets: Targets, output_tokens: int) -> float:
    """How long after its arrival a request may still be attained."""
    if targets.deadline_ms is not None:
        return targets.deadline_ms
    if targets.ttft_ms is None:
        return float("inf")
    # Every gap but the one that may be late is within its target; that one is given ten times as long.
    return targets.ttft_ms + (output_tokens + 10) * (targets.tbt_ms or 0.0)


def percentiles(values: npt.ArrayLike) -> dict[str, float | None]:
    """p50, p90, p99, mean and max; None each when there are no values."""
    found = np.asarray(values, np.float64)
    found = found[np.isfinite(found)]
    if not found.size:
        return dict.fromkeys(("p50", "p90", "p99", "mean", "max"))
    p50, p90, p99 = (round(float(p), 2) for p in np.percentile(found, (50, 90, 99)))
    mean, most = round(float(found.mean()), 2), round(float(found.max()), 2)
    return {"p50": p50, "p90": p90, "p99": p99, "mean": mean, "max": most}


def class_figures(answers: Sequence[Answer], targets: Targets) -> dict[str, Any]:
    """The figures of one class under one policy."""
    met = sum(attained(a, targets) for a in answers)
    gaps = [a.gaps_ms for a in answers]
    return {
        "requests": len(answers),
        "attained": met,
        "attainment": met / len(answers) if answers else None,
        "completed": sum(a.finished for a in answers),
        "demoted": sum(a.demoted for a in answers),
        "refused_or_expired": sum(bool(a.error) for a in answers),
        "without_token": sum(not a.token_ms.size for a in answers),
        "ttft_ms": percentiles([a.ttft_ms for a in answers]),
        "tbt_ms": percentiles(np.concatenate(gaps) if gaps else []),
        "e2e_ms": percentiles([a.e2e_ms for a in answers]),
        "ttft_target_ms": targets.ttft_ms,
        "tbt_target_ms": targets.tbt_ms,
        "deadline_ms": targets.deadline_ms,
    }


def output_rate(answers: Sequence[Answer], start_ms: float, seconds: float) -> float:
    """Output tokens per second that were emitted within `seconds` from `start_ms` on."""
    times = np.concatenate([a.token_ms for a in answers]) if answers else np.empty(0)
    return float(((times >= start_ms) & (times <= start_ms + seconds * 1000)).sum()) / seconds


def policy_figures(
    answers: Sequence[Answer], targets: Mapping[str, Targets], start_ms: float, seconds: float
) -> dict[str, Any]:
    """The figures of one policy: overall and by class."""
    classes = {
        cls: class_figures([a for a in answers if a.prompt.cls == cls], targets[cls]) for cls in CLASSES
    }
    met = sum(figures["attained"] for figures in classes.values())
    return {
        "requests": len(answers),
        "attained": met,
        "attainment": met / len(answers),
        "output_tokens_per_s": output_rate(answers, start_ms, seconds),
        "classes": classes,
    }
