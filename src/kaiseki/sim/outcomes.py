"""What happened to each request of a run, as columns: for Parquet, plots and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kaiseki.core.reasons import Outcome, Reason
from kaiseki.sim.loop import Log

_FROM_ENDING = (
    "attained", "demoted", "admitted_ns", "first_token_ns", "ended_ns", "outputs", "cached", "preemptions",
    "recomputed", "late_gaps", "service_ns",
)  # fmt: skip


def columns(log: Log) -> dict[str, list[Any]]:
    """One value per request and column, in the order in which they ended, refused ones last.

    Times are ns since the beginning of the trace, counts are tokens; what never happened is None.
    """
    rows = [
        {
            **_asked(request),
            "outcome": ending.outcome.label,
            "reason": ending.reason.label,
            **{key: getattr(ending, key) for key in _FROM_ENDING},
            "arrival_ns": ending.arrival_ns,
        }
        for request, ending in log.endings
    ]
    rows += [
        {
            **_asked(request),
            **dict.fromkeys(_FROM_ENDING),
            "outcome": Outcome.REFUSED.label,
            "reason": Reason(refusal.reason).label,
            "attained": False,
        }
        for request, refusal in log.refusals
    ]
    for row in rows:
        for key in ("admitted_ns", "first_token_ns"):
            row[key] = None if row[key] is not None and row[key] < 0 else row[key]
    return {key: [row[key] for row in rows] for key in (rows[0] if rows else {})}


def _asked(request: Any) -> dict[str, Any]:
    return {
        "request": request.id,
        "tenant": request.tenant,
        "class": request.cls.name,
        "arrival_ns": request.arrival_ns,
        "prompt": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "ttft_target_ns": request.ttft_target_ns,
        "tbt_target_ns": request.cls.tbt_ns,
        "deadline_ns": request.cls.deadline_ns,
    }


def write_parquet(logs: Mapping[str, Log], path: Path) -> None:
    """All requests of all policies, with a column `policy`.

    Raises:
        ImportError: `pyarrow` is not installed.
        OSError: the file can't be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for policy, log in logs.items():
        found = columns(log)
        if found:
            tables.append(pa.table({"policy": [policy] * len(found["request"]), **found}))
    pq.write_table(pa.concat_tables(tables, promote_options="permissive"), path)
