"""Why a request waited: its life as a timeline, every wait attributed to a reason.

A request that was touched in a slot has a record of its own. For slots in which it was not looked at,
its reason follows from its key against the cutoff of its tenant's queue that was in force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.observe.history import History, Story, summary_of

_WAIT_BEGINS = (Event.SUBMITTED, Event.PREEMPTED, Event.RETRIED)
_WAIT_ENDS = (Event.ADMITTED, Event.EXPIRED, Event.CANCELLED, Event.FAILED, Event.FINISHED)
_IN_NO_QUEUE = (Reason.HELD_FOR_FORK, Reason.BACK_OFF)
_SHORT_IN = {
    Reason.NO_ROW: "{:.0f} batch row short",
    Reason.NO_KV: "{:.0f} KV blocks short",
    Reason.WATERMARK: "{:.0f} KV blocks over the watermark",
    Reason.FAIR_SHARE: "its tenant was {:.0f} ms of service beyond the fairness lag",
    Reason.BACK_OFF: "for {:.0f} ms",
    Reason.BEHIND: "{:.0f} requests of its tenant waited",
    Reason.NO_TIME: "{:.0f} tokens wanted",
    Reason.NO_TOKENS: "{:.0f} tokens wanted",
}


@dataclass(slots=True)
class Wait:
    """One stretch of waiting with one reason."""

    start_ns: int
    end_ns: int
    reason: Reason
    yielded_to: str | None
    short_by: float


def explain(history: History, request_id: str, now_ns: int) -> dict[str, Any] | None:
    """The explain document of a request (keys as documented for `kaiseki explain`), None if unknown."""
    story = history.story(request_id)
    if story is None:
        return None
    if story.refusal is not None:
        return _refused(story)
    records = history.records.read()
    mine = records[records["seq"] == story.seq]
    origin = story.request.arrival_ns
    waits = _waits(history, story, mine, now_ns)
    total_ns = sum(w.end_ns - w.start_ns for w in waits)
    return {
        **summary_of(story),
        "timeline": [_event(history, record, origin) for record in mine],
        "waits": [_told(w) for w in _merged(waits)],
        "total_wait_ms": round(total_ns / 1e6, 3),
        "counterfactuals": _counterfactuals(waits),
        "summary": _summary(story, waits, total_ns),
    }


def _refused(story: Story) -> dict[str, Any]:
    assert story.refusal is not None
    numbers = ", ".join(f"{k} {v:g}" for k, v in story.numbers.items())
    detail = f"{story.refusal.sentence}" + (f" ({numbers})" if numbers else "")
    event = {"slot": None, "t_ms": 0.0, "event": Event.REFUSED.label, "reason": story.refusal.label}
    return {
        **summary_of(story),
        "timeline": [{**event, "detail": detail}],
        "waits": [],
        "total_wait_ms": 0.0,
        "counterfactuals": [],
        "summary": f"{story.request.id} was refused: {detail}.",
    }


def _waits(history: History, story: Story, mine: npt.NDArray[np.void], now_ns: int) -> list[Wait]:
    """Stretches from entering the queue to leaving it, and from a pause to the next chunk."""
    waits: list[Wait] = []
    since: int | None = None
    paused = False
    marks: list[tuple[int, Reason, int, float]] = []
    for record in mine:
        event, t_ns = Event(int(record["event"])), int(record["t_ns"])
        mark = (t_ns, Reason(int(record["reason"])), int(record["other"]), float(record["amount"]))
        if event in _WAIT_BEGINS:
            if since is not None:  # it was paused when it was stopped
                waits += _stretch(history, story, since, t_ns, marks, paused)
            since, paused = (story.request.arrival_ns if event == Event.SUBMITTED else t_ns), False
            marks = []
        elif event == Event.PASSED_OVER:
            if mark[1] in _IN_NO_QUEUE and since is not None:
                paused, marks = True, [(since, Reason.SLOT_RUNNING, -1, 0.0)]
            marks.append(mark)
        elif event == Event.REKEYED and since is not None:
            waits += _stretch(history, story, since, t_ns, marks, paused)
            since, paused, marks = t_ns, False, []
        elif event == Event.PAUSED:
            if paused and since is not None:
                waits += _stretch(history, story, since, t_ns, marks, paused)
            since, paused, marks = t_ns, True, [mark]
        elif since is not None and (event in _WAIT_ENDS or (paused and event == Event.RESUMED)):
            waits += _stretch(history, story, since, t_ns, marks, paused)
            since, paused = None, False
    if since is not None and story.ending is None:
        waits += _stretch(history, story, since, now_ns, marks, paused)
    return waits


def _stretch(
    history: History,
    story: Story,
    start: int,
    end: int,
    marks: list[tuple[int, Reason, int, float]],
    paused: bool,
) -> list[Wait]:
    """Cut one wait at every change of reason; the parts add up to the whole."""
    changes = list(marks)
    if not paused:
        slots = history.slots.read()
        decided = slots["decided_ns"][(slots["decided_ns"] >= start) & (slots["decided_ns"] <= end)]
        first = int(decided[0]) if decided.size else end
        changes.append((start, Reason.SLOT_RUNNING, -1, 0.0))
        changes += _from_cutoffs(history, story, first, end)
    changes.sort(key=lambda c: c[0])
    waits: list[Wait] = []
    for i, (t_ns, reason, other, amount) in enumerate(changes):
        begin = max(t_ns, start)
        until = changes[i + 1][0] if i + 1 < len(changes) else end
        until = min(max(until, begin), end)
        if until > begin:
            waits.append(Wait(begin, until, reason, history.name_of(other), amount))
    return waits


def _from_cutoffs(
    history: History, story: Story, first: int, end: int
) -> list[tuple[int, Reason, int, float]]:
    """Reasons that follow from the queue's cutoffs between its first decision and the end of the wait."""
    cuts = history.cutoffs.read()
    cuts = cuts[(cuts["tenant"] == story.tenant) & (cuts["t_ns"] < end)]
    before = cuts[cuts["t_ns"] < first][-1:]
    inside = cuts[cuts["t_ns"] >= first]
    found = []
    for cut in np.concatenate([before, inside]):
        reason, since = Reason(int(cut["reason"])), max(int(cut["t_ns"]), first)
        found.append((since, reason, int(cut["seq"]), float(cut["short_by"])))
    return found


def _merged(waits: list[Wait]) -> list[Wait]:
    """One entry per reason and beneficiary, longest first."""
    by: dict[tuple[Reason, str | None], Wait] = {}
    for w in waits:
        known = by.get((w.reason, w.yielded_to))
        if known is None:
            by[w.reason, w.yielded_to] = Wait(0, w.end_ns - w.start_ns, w.reason, w.yielded_to, w.short_by)
        else:
            known.end_ns += w.end_ns - w.start_ns
            known.short_by = min(known.short_by, w.short_by)
    return sorted(by.values(), key=lambda w: -w.end_ns)


def _told(w: Wait) -> dict[str, Any]:
    return {
        "reason": w.reason.label,
        "ms": round((w.end_ns - w.start_ns) / 1e6, 3),
        "yielded_to": w.yielded_to,
        "detail": w.reason.sentence,
    }


def _event(history: History, record: npt.NDArray[np.void], origin: int) -> dict[str, Any]:
    event, reason = Event(int(record["event"])), Reason(int(record["reason"]))
    detail = event.sentence
    if reason not in (Reason.NONE, Reason.SELECTED):
        detail += f": {reason.sentence}"
        if reason in _SHORT_IN:
            scale = 1e-6 if reason in (Reason.FAIR_SHARE, Reason.BACK_OFF) else 1.0
            detail += f" ({_SHORT_IN[reason].format(float(record['amount']) * scale)})"
    elif event == Event.ADMITTED:
        detail += f" ({record['amount']:.0f} tokens)"
    if reason == Reason.PURCHASED:
        side = "price" if event == Event.PREEMPTED else "value"
        detail += f" ({side} {record['amount']:.3f} s of card time)"
    other = history.name_of(int(record["other"]))
    if other is not None and event in (Event.PREEMPTED, Event.PASSED_OVER, Event.PAUSED):
        detail += f", in favour of {other}"
    return {
        "slot": int(record["slot"]),
        "t_ms": round((int(record["t_ns"]) - origin) / 1e6, 3),
        "event": event.label,
        "reason": reason.label,
        "detail": detail,
    }


def _counterfactuals(waits: list[Wait]) -> list[str]:
    """What would have let it run sooner, from the figures behind its longest wait."""
    told = []
    for w in _merged(waits)[:3]:
        ms = (w.end_ns - w.start_ns) / 1e6
        if w.reason in (Reason.NO_KV, Reason.WATERMARK) and w.short_by > 0:
            told.append(f"with {w.short_by:.0f} more KV blocks it would have waited up to {ms:.0f} ms less")
        elif w.reason == Reason.NO_ROW:
            told.append(f"with a larger max_batch_size it would have waited up to {ms:.0f} ms less")
        elif w.reason == Reason.FAIR_SHARE:
            told.append(f"with a larger weight for its tenant it would have waited up to {ms:.0f} ms less")
        elif w.reason in (Reason.NO_TIME, Reason.DECODE_BOUND):
            told.append(f"with looser TBT targets beside it, it would have waited up to {ms:.0f} ms less")
    return told


def _summary(story: Story, waits: list[Wait], total_ns: int) -> str:
    e, r = story.ending, story.request
    what = f"{r.id} ({r.tenant}/{r.cls.name}, {r.prompt_tokens} prompt tokens)"
    if e is None:
        state = "is still open"
    elif e.outcome == Outcome.COMPLETED:
        state = f"completed with {e.outputs} tokens and {'met' if e.attained else 'missed'} its SLO"
    else:
        state = f"{e.outcome.sentence}: {e.reason.sentence}"
    text = f"{what} {state}; it waited {total_ns / 1e6:.0f} ms"
    longest = _merged(waits)[:1]
    if longest and total_ns > 0:
        w = longest[0]
        text += f", {(w.end_ns - w.start_ns) / total_ns:.0%} of it because {w.reason.sentence}"
    if e is not None and e.preemptions:
        text += f"; it was preempted {e.preemptions} times"
    return text + "."
