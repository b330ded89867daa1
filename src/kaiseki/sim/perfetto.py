"""A run as a picture: Chrome's trace format, which ui.perfetto.dev opens.

A process per policy. Each request is a track with what it did: waited, computed its prompt, gave tokens.
Above them are the numbers of requests that wait and run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from kaiseki.core.endings import Ending
from kaiseki.core.requests import Request
from kaiseki.sim.loop import Log


def write(logs: Mapping[str, Log], path: Path) -> None:
    """Write the trace of all policies.

    Raises:
        OSError: the file can't be written.
    """
    events = [event for i, (name, log) in enumerate(logs.items()) for event in _process(i + 1, name, log)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _process(pid: int, name: str, log: Log) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    steps: list[tuple[int, int, int]] = []  # time, change in waiting, change in running
    for request, ending in log.endings:
        yield from _spans(pid, request, ending)
        if ending.admitted_ns < 0:
            steps += [(ending.arrival_ns, 1, 0), (ending.ended_ns, -1, 0)]
            continue
        steps += [(ending.arrival_ns, 1, 0), (ending.admitted_ns, -1, 1), (ending.ended_ns, 0, -1)]
    waiting = running = 0
    for at, more_wait, more_run in sorted(steps, key=itemgetter(0)):
        waiting, running = waiting + more_wait, running + more_run
        args = {"waiting": waiting, "running": running}
        yield {"ph": "C", "pid": pid, "ts": at / 1e3, "name": "requests", "args": args}


def _spans(pid: int, request: Request, ending: Ending) -> Iterator[dict[str, Any]]:
    """The request as a whole, and inside it what followed on what."""
    told = {
        "tenant": request.tenant,
        "outcome": ending.outcome.label,
        "attained": ending.attained,
        "prompt": ending.prompt,
        "outputs": ending.outputs,
        "preemptions": ending.preemptions,
        "late_gaps": ending.late_gaps,
    }
    marks = [("waits", ending.arrival_ns), ("prefill", ending.admitted_ns), ("decode", ending.first_token_ns)]
    marks = [(name, at) for name, at in marks if at >= 0]
    ends = [at for _, at in marks[1:]] + [ending.ended_ns]
    spans = [(f"request {request.id}", ending.arrival_ns, ending.ended_ns, told)]
    spans += [(name, at, end, {}) for (name, at), end in zip(marks, ends, strict=True)]
    for name, at, end, args in spans:
        same = {"pid": pid, "cat": request.cls.name, "id": request.id, "name": name}
        yield {"ph": "b", "ts": at / 1e3, "args": args, **same}
        yield {"ph": "e", "ts": end / 1e3, **same}
