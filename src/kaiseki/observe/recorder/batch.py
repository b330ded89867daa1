"""Why this batch? What one recorded slot ran, what bound it, and who was left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kaiseki.core.reasons import Event, Reason
from kaiseki.core.requests import NEVER_NS
from kaiseki.observe.explain import event_told, short_told
from kaiseki.observe.history import History
from kaiseki.observe.recorder.layout import Kind
from kaiseki.observe.recorder.past import Submitted, history_of, submitted
from kaiseki.observe.recorder.reading import Recording

Sections = dict[str, npt.NDArray[Any]]


def explain_slot(recording: Recording, slot: int) -> dict[str, Any] | None:
    """The document of a slot (keys as told for `kaiseki explain --slot`), None if it is not recorded."""
    rows: dict[int, Submitted] = {}
    tenants: dict[int, str] = {}
    decided, applied, at_ns = None, None, 0
    for frame in recording.frames:
        if frame.kind in (Kind.OPENED, Kind.KEYFRAME) and decided is None:
            for s in submitted(frame.sections()):
                rows[s.row], tenants[s.tenant] = s, s.request.tenant
        elif frame.slot == slot and frame.kind == Kind.DECIDED:
            decided, at_ns = frame.sections(), frame.t_ns
        elif frame.slot == slot and frame.kind == Kind.APPLIED:
            applied = frame.sections()
    if decided is None:
        return None
    history = history_of(recording)
    step = decided["decision"][0]
    chunks = [
        _chunk(rows.get(row), row, tokens, start)
        for row, tokens, start in zip(
            *(decided[name].tolist() for name in ("rows", "tokens", "starts")), strict=True
        )
    ]
    measured = (
        None if applied is None else int(applied["step"][0]["ended_ns"] - applied["step"][0]["started_ns"])
    )
    bound = int(step["bound_ns"])
    document = {
        "slot": slot,
        "t_ms": round((at_ns - recording.opened_ns) / 1e6, 3),
        "running": int(step["running"]),
        "waiting": int(step["waiting"]),
        "kv_blocks": {name: int(step[f"{name}_blocks"]) for name in ("free", "live", "total")},
        "decide_us": None if step["spent_ns"] < 0 else round(int(step["spent_ns"]) / 1e3, 1),
        "predicted_ms": round(int(step["predicted_ns"]) / 1e6, 3),
        "measured_ms": None if measured is None else round(measured / 1e6, 3),
        "bound_ms": None if bound >= NEVER_NS else round(bound / 1e6, 3),
        "chunks": chunks,
        "touched": _touched(history, decided, at_ns),
        "cutoffs": [_cutoff(cut, tenants) for cut in _in_force(history, slot)],
    }
    return document | {"summary": _summary(document)}


def _chunk(who: Submitted | None, row: int, tokens: int, start: int) -> dict[str, Any]:
    if who is None:
        return {"request": None, "row": row, "tenant": None, "class": None, "kind": None,
                "tokens": tokens, "start": start}  # fmt: skip
    r = who.request
    kind = "decode" if start >= r.prompt_tokens and tokens == 1 else "prefill"
    return {"request": r.id, "row": row, "tenant": r.tenant, "class": r.cls.name, "kind": kind,
            "tokens": tokens, "start": start}  # fmt: skip


def _touched(history: History, decided: Sections, at_ns: int) -> list[dict[str, Any]]:
    """Whoever has a record in this slot: taken on, passed over, stopped, and why."""
    return [
        {"request": history.name_of(int(record["seq"])), **event_told(history, record, at_ns)}
        for record in decided["records"]
    ]


def _in_force(history: History, slot: int) -> npt.NDArray[Any]:
    """CUTOFF[n]: for each tenant the last that came into force by this slot, unless long ago."""
    cuts = history.cutoffs.read()
    cuts = cuts[cuts["slot"] <= slot]
    _, last = np.unique(cuts["tenant"][::-1], return_index=True)
    return cuts[::-1][last]


def _cutoff(cut: Any, tenants: dict[int, str]) -> dict[str, Any]:
    reason = Reason(int(cut["reason"]))
    return {
        "tenant": tenants.get(int(cut["tenant"])),
        "since_slot": int(cut["slot"]),
        "reason": reason.label,
        "detail": reason.sentence + short_told(reason, float(cut["short_by"])),
    }


def _summary(d: dict[str, Any]) -> str:
    decodes = [c for c in d["chunks"] if c["kind"] == "decode"]
    tokens = sum(c["tokens"] for c in d["chunks"]) - len(decodes)
    text = f"slot {d['slot']} ran {len(decodes)} decodes and {len(d['chunks']) - len(decodes)} prompt chunks"
    text += f" ({tokens} tokens)"
    if d["measured_ms"] is not None:
        text += f" in {d['measured_ms']:.1f} ms"
    text += f", {d['predicted_ms']:.1f} predicted"
    if d["bound_ms"] is not None:
        text += f", {d['bound_ms']:.1f} allowed by the tightest target"
    text += f"; {d['waiting']} waited"
    left = [e for e in d["touched"] if e["event"] == Event.PASSED_OVER.label]
    if left:
        text += (
            f", {len(left)} were looked at and not taken, the first as {left[0]['detail'].partition(': ')[2]}"
        )
    elif d["waiting"] and d["cutoffs"]:
        text += f" as {d['cutoffs'][0]['detail']}"
    return text + "."
