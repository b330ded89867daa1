"""A recording for other tools: tables for Parquet, and a picture for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.observe.explain import Kept
from kaiseki.observe.history import History, Story
from kaiseki.observe.recorder.layout import Kind
from kaiseki.observe.recorder.past import history_of
from kaiseki.observe.recorder.reading import Recording
from kaiseki.observe.recorder.share import steps

Columns = dict[str, Any]
"""Equally long lists or arrays, by name."""

_DOING = {
    Event.SUBMITTED: "waits",
    Event.ADMITTED: "prefill",
    Event.FIRST_TOKEN: "decode",
    Event.PREEMPTED: "waits again",
    Event.RETRIED: "waits again",
    Event.PAUSED: "paused",
    Event.RESUMED: "goes on",
    Event.FINISHED: None,
    Event.EXPIRED: None,
    Event.FAILED: None,
    Event.CANCELLED: None,
}
"""What a request does from an event on; None when it has ended."""


def tables(recording: Recording) -> dict[str, Columns]:
    """Everything but digests and state. Times are ns by the recording's clock, None where there is none."""
    history = history_of(recording)
    events, cutoffs = history.records.read(), history.cutoffs.read()
    return {
        "requests": _requests(history),
        "slots": _slots(recording),
        "chunks": _chunks(recording),
        "events": {
            **{name: events[name] for name in ("slot", "t_ns", "seq", "other", "amount")},
            "event": [Event(e).label for e in events["event"].tolist()],
            "reason": [Reason(r).label for r in events["reason"].tolist()],
        },
        "cutoffs": {
            **{name: cutoffs[name] for name in ("slot", "t_ns", "tenant", "key", "seq", "short_by")},
            "reason": [Reason(r).label for r in cutoffs["reason"].tolist()],
        },
    }


def to_parquet(recording: Recording, folder: Path) -> list[Path]:
    """One file per table of `tables`. Returns them.

    Raises:
        ImportError: `pyarrow` is not installed.
        OSError: a file can't be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, columns in tables(recording).items():
        paths.append(folder / f"{recording.name}.{name}.parquet")
        ready = {
            key: np.ascontiguousarray(column) if isinstance(column, np.ndarray) else column
            for key, column in columns.items()
        }
        pq.write_table(pa.table(ready), paths[-1])
    return paths


def to_perfetto(recording: Recording, folder: Path) -> list[Path]:
    """One file in Chrome's trace format: the steps, how things stood, and a track per request.

    Raises:
        OSError: it can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{recording.name}.perfetto.json"
    events = [*_steps_drawn(recording), *_requests_drawn(history_of(recording))]
    name = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": recording.name}}
    path.write_text(json.dumps({"traceEvents": [name, *events], "displayTimeUnit": "ms"}), encoding="utf-8")
    return [path]


def _requests(history: History) -> Columns:
    found: Columns = defaultdict(list)
    for story in history.stories():
        for key, value in _request(story).items():
            found[key].append(value)
    return dict(found)


def _request(story: Story) -> dict[str, Any]:
    r, e = story.request, story.ending
    outcome, reason = (Outcome.OPEN, Reason.NONE) if e is None else (e.outcome, e.reason)
    if story.refusal is not None:
        outcome, reason = Outcome.REFUSED, story.refusal
    numbers = (
        "attained",
        "demoted",
        "outputs",
        "cached",
        "preemptions",
        "recomputed",
        "late_gaps",
        "service_ns",
    )
    times = ("admitted_ns", "first_token_ns", "ended_ns")
    at = {name: None if e is None or getattr(e, name) < 0 else getattr(e, name) for name in times}
    return {
        "request": r.id,
        "seq": story.seq,
        "tenant": r.tenant,
        "class": r.cls.name,
        "prompt": r.prompt_tokens,
        "max_tokens": r.max_tokens,
        "outcome": outcome.label,
        "reason": reason.label,
        "arrival_ns": r.arrival_ns,
        **at,
        **{name: None if e is None else getattr(e, name) for name in numbers},
    }


def _slots(recording: Recording) -> Columns:
    measured = {frame.slot: frame.sections()["step"][0].tolist() for frame in recording.of_kind(Kind.APPLIED)}
    found: Columns = defaultdict(list)
    for frame in recording.of_kind(Kind.DECIDED):
        sections = frame.sections()
        step = sections["decision"][0]
        started, ended, _ = measured.get(frame.slot, (None, None, None))
        row = {
            "slot": frame.slot,
            "decided_ns": frame.t_ns,
            "started_ns": started,
            "ended_ns": ended,
            **{name: int(step[name]) for name in step.dtype.names},
            "chunks": sections["rows"].size,
            "tokens": int(sections["tokens"].sum()),
            "preempted": sections["preempted"].size,
        }
        for key, value in row.items():
            found[key].append(value)
    return dict(found)


def _chunks(recording: Recording) -> Columns:
    done = list(steps(recording.frames))
    none = np.empty(0, np.int64)
    return {
        "slot": np.concatenate([none, *(np.full(s.seqs.size, s.slot) for s in done)]),
        "seq": np.concatenate([none, *(s.seqs for s in done)]),
        "tokens": np.concatenate([none, *(s.tokens for s in done)]),
        "start": np.concatenate([none, *(s.starts for s in done)]),
        "decode": np.concatenate([np.empty(0, np.bool_), *(s.decodes for s in done)]),
    }


def _steps_drawn(recording: Recording) -> Iterator[dict[str, Any]]:
    on = {"pid": 1, "tid": 0}
    yield {"ph": "M", **on, "name": "thread_name", "args": {"name": "steps"}}
    for step in steps(recording.frames):
        decodes = int(step.decodes.sum())
        args = {"decodes": decodes, "prefills": step.seqs.size - decodes, "tokens": int(step.tokens.sum())}
        begin = (step.ended_ns - step.took_ns) / 1e3
        yield {
            "ph": "X",
            **on,
            "ts": begin,
            "dur": step.took_ns / 1e3,
            "name": f"slot {step.slot}",
            "args": args,
        }
    for frame in recording.of_kind(Kind.DECIDED):
        step_ = frame.sections()["decision"][0]
        for name, keys in (
            ("requests", ("waiting", "running")),
            ("KV blocks", ("live_blocks", "free_blocks")),
        ):
            args = {key: int(step_[key]) for key in keys}
            yield {"ph": "C", "pid": 1, "ts": frame.t_ns / 1e3, "name": name, "args": args}


def _requests_drawn(history: History) -> Iterator[dict[str, Any]]:
    kept = Kept(history, of_many=True)
    for story in history.stories():
        if story.refusal is not None:
            continue
        same = {"pid": 1, "cat": story.request.cls.name, "id": story.request.id}
        doing, args, last = None, {}, story.request.arrival_ns
        for record in kept.records_of(story.seq):
            event, reason = Event(int(record["event"])), Reason(int(record["reason"]))
            if event not in _DOING:
                continue
            last = story.request.arrival_ns if event == Event.SUBMITTED else int(record["t_ns"])
            if doing is not None:
                yield {"ph": "e", "ts": last / 1e3, "name": doing, **same}
            doing = _DOING[event]
            args = {"tenant": story.request.tenant, "reason": reason.label, "slot": int(record["slot"])}
            if doing is not None:
                yield {"ph": "b", "ts": last / 1e3, "name": doing, "args": args, **same}
        if doing is not None:
            yield {"ph": "e", "ts": last / 1e3, "name": doing, **same}
