"""Why a request waited: its life as a timeline, every wait attributed to a reason.

A request that was touched in a slot has a record of its own, which says why in that slot. For slots in
which it was not looked at, its reason follows from the cutoff of its tenant's queue that was in force.
What that takes depends on how much is kept of the past, not on how many wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kaiseki.core.endings import Ending
from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.core.requests import Request
from kaiseki.core.scan import allowed_late_gaps
from kaiseki.observe.history import History, Limits, Story, summary_of

_WAIT_BEGINS = (Event.SUBMITTED, Event.PREEMPTED, Event.RETRIED)
_WAIT_ENDS = (Event.ADMITTED, Event.EXPIRED, Event.CANCELLED, Event.FAILED, Event.FINISHED)
_IN_NO_QUEUE = (Reason.HELD_FOR_FORK, Reason.BACK_OFF)
_KNOWN_TO_WAIT = (Event.PASSED_OVER, Event.ADMITTED, Event.REKEYED, Event.EXPIRED)
"""Events that only a request which waits can have first, where the record of its submit is gone."""
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


BODY_ID_PREFIXES = ("chatcmpl-", "cmpl-")
"""What an id has before it in the bodies of answers."""
MOST_TOLD = 32
"""Most parts that a wait is told in; smaller ones are put together by reason."""

WAIT = np.dtype(
    [
        ("ns", np.int64),
        ("slots", np.int64),
        ("reason", np.int8),
        ("other", np.int64),
        ("short_by", np.float64),
    ]
)
"""A stretch of waiting with one reason, and how many decisions were made in it; `other` is the arrival
sequence of who went instead, or -1."""

Waits = npt.NDArray[np.void]
Mark = tuple[int, Reason, int, float]
"""From when on, why, in whose favour, by how much it was short."""


@dataclass(frozen=True, slots=True)
class Wait:
    """All waiting of a request with one reason, in favour of one other request."""

    ns: int
    slots: int
    reason: Reason
    yielded_to: str | None
    short_by: float


class Past(NamedTuple):
    """What is kept of the slots in which one tenant's requests waited: CUTOFF[n], and when slots were."""

    cutoffs: npt.NDArray[np.void]
    decided_ns: npt.NDArray[np.int64]


class Kept:
    """What a history keeps, read once.

    Args:
        history: whose.
        of_many: whether the records of many requests will be asked for, so that sorting them pays.
    """

    def __init__(self, history: History, of_many: bool = False) -> None:
        self._records, self._sorted = history.records.read(), of_many
        if of_many:
            self._records = self._records[np.argsort(self._records["seq"], kind="stable")]
            self._seqs = np.ascontiguousarray(self._records["seq"])
        self._cutoffs = history.cutoffs.read()
        self._decided_ns = np.ascontiguousarray(history.slots.read()["decided_ns"])

    def records_of(self, seq: int) -> npt.NDArray[np.void]:
        """RECORD[n] of one request, in order."""
        if self._sorted:
            first, last = np.searchsorted(self._seqs, (seq, seq + 1)).tolist()
            found: npt.NDArray[np.void] = self._records[first:last]
        else:
            found = self._records[self._records["seq"] == seq]
        return found

    def past_of(self, tenant: int) -> Past:
        """The slots as seen by a tenant."""
        return Past(self._cutoffs[self._cutoffs["tenant"] == tenant], self._decided_ns)


def explain(history: History, request_id: str, now_ns: int) -> dict[str, Any] | None:
    """The explain document of a request (keys as documented for `kaiseki explain`), None if unknown."""
    story = history.story(request_id)
    return None if story is None else explain_story(history, Kept(history), story, now_ns)


def explain_story(history: History, kept: Kept, story: Story, now_ns: int) -> dict[str, Any]:
    """As `explain`, of what was found before."""
    if story.refusal is not None:
        return _refused(story)
    mine = kept.records_of(story.seq)
    origin = story.request.arrival_ns
    waits = waits_of(history, kept, story, now_ns)
    total_ns = sum(w.ns for w in waits)
    return {
        **summary_of(story),
        "timeline": [event_told(history, record, origin) for record in mine],
        "waits": [_told(w) for w in waits],
        "total_wait_ms": round(total_ns / 1e6, 3),
        "counterfactuals": _counterfactuals(waits, history.limits),
        "summary": _summary(story, waits, total_ns),
    }


def waits_of(history: History, kept: Kept, story: Story, now_ns: int) -> list[Wait]:
    """All waiting of a request that was not refused, by reason and beneficiary, longest first."""
    return _merged(history, _waits(kept.past_of(story.tenant), story, kept.records_of(story.seq), now_ns))


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


def _waits(past: Past, story: Story, mine: npt.NDArray[np.void], now_ns: int) -> Waits:
    """WAIT[n]: stretches from entering the queue to leaving it, and from a pause to the next chunk."""
    waits: list[Waits] = []
    since: int | None = None
    paused = False
    marks: list[Mark] = []
    if mine.size and mine[0]["event"] in _KNOWN_TO_WAIT:
        since = story.request.arrival_ns  # the record of its submit has made room for newer ones
    for record in mine:
        event, t_ns = Event(int(record["event"])), int(record["t_ns"])
        mark = (t_ns, Reason(int(record["reason"])), int(record["other"]), float(record["amount"]))
        if event in _WAIT_BEGINS:
            if since is not None:  # it was paused when it was stopped
                waits.append(_stretch(past, since, t_ns, marks, paused))
            since, paused = (story.request.arrival_ns if event == Event.SUBMITTED else t_ns), False
            marks = []
        elif event == Event.PASSED_OVER:
            if mark[1] in _IN_NO_QUEUE and since is not None:
                paused, marks = True, [(since, Reason.SLOT_RUNNING, -1, 0.0)]
            marks.append(mark)
        elif event == Event.REKEYED and since is not None:
            waits.append(_stretch(past, since, t_ns, marks, paused))
            since, paused, marks = t_ns, False, []
        elif event == Event.PAUSED:
            if paused and since is not None:
                waits.append(_stretch(past, since, t_ns, marks, paused))
            since, paused, marks = t_ns, True, [mark]
        elif event == Event.ADMITTED and mark[1] == Reason.PURCHASED:
            continue  # room was bought for it; that it was taken is a record of its own
        elif since is not None and (event in _WAIT_ENDS or (paused and event == Event.RESUMED)):
            waits.append(_stretch(past, since, t_ns, marks, paused))
            since, paused, marks = None, False, []
    if since is not None and story.ending is None:
        waits.append(_stretch(past, since, now_ns, marks, paused))
    return np.concatenate([np.zeros(0, WAIT), *waits])


def _stretch(past: Past, start: int, end: int, marks: list[Mark], paused: bool) -> Waits:
    """Cut one wait at every change of reason; the parts add up to the whole."""
    own = marks if paused else [(start, Reason.SLOT_RUNNING, -1, 0.0), *marks]
    cuts = past.cutoffs[:0] if paused else _in_force(past, start, end)
    # Where its adapter can't be had, it does not matter where the queue is cut, until it is looked at again.
    last = np.searchsorted([mark[0] for mark in own], cuts["t_ns"], side="right") - 1
    cuts = cuts[[own[i][1] != Reason.ADAPTER for i in last.tolist()]]
    n = len(own)
    begins, rank = np.empty(n + cuts.size, np.int64), np.ones(n + cuts.size)
    rank[0], rank[n:] = paused, 0
    waits: Waits = np.zeros(n + cuts.size, WAIT)
    for i, (t_ns, reason, other, short_by) in enumerate(own):
        begins[i], waits[i] = t_ns, (0, 0, reason, other, short_by)
    begins[n:] = cuts["t_ns"]
    waits["reason"][n:], waits["other"][n:] = cuts["reason"], cuts["seq"]
    waits["short_by"][n:] = cuts["short_by"]
    # In a slot in which it was looked at its own record counts, and not where the queue was cut.
    order = np.lexsort((rank, begins))
    waits, begins = waits[order], np.clip(begins[order], start, max(start, end))
    edges = np.append(begins, max(start, end))
    waits["ns"] = np.diff(edges)
    waits["slots"] = np.diff(np.searchsorted(past.decided_ns, edges))
    return waits[waits["ns"] > 0]


def _in_force(past: Past, start: int, end: int) -> npt.NDArray[np.void]:
    """CUTOFF[n] that say why it waited, from the first decision that could have taken it on."""
    at = int(np.searchsorted(past.decided_ns, start))
    first = int(past.decided_ns[at]) if at < past.decided_ns.size else end
    times = past.cutoffs["t_ns"]
    before = int(np.searchsorted(times, first))
    cuts = past.cutoffs[max(before - 1, 0) : int(np.searchsorted(times, end))].copy()
    cuts["t_ns"] = np.maximum(cuts["t_ns"], first)
    return cuts


def _merged(history: History, waits: Waits) -> list[Wait]:
    """One entry per reason and beneficiary, longest first; small ones together where there are many."""
    groups = _summed(waits)
    if groups.size > MOST_TOLD:
        groups["other"][MOST_TOLD:] = -1
        groups = _summed(groups)
    return [
        Wait(
            int(g["ns"]),
            int(g["slots"]),
            Reason(int(g["reason"])),
            history.name_of(int(g["other"])),
            float(g["short_by"]),
        )
        for g in groups
    ]


def _summed(waits: Waits) -> Waits:
    """One WAIT per reason and beneficiary: sums of ns and slots, the least that was short; longest first."""
    _, first, group = np.unique(waits[["reason", "other"]], return_index=True, return_inverse=True)
    sums: Waits = waits[first]
    sums["ns"] = sums["slots"] = 0
    np.add.at(sums["ns"], group, waits["ns"])
    np.add.at(sums["slots"], group, waits["slots"])
    np.minimum.at(sums["short_by"], group, waits["short_by"])
    return sums[np.argsort(-sums["ns"], kind="stable")]


def _told(w: Wait) -> dict[str, Any]:
    return {
        "reason": w.reason.label,
        "ms": round(w.ns / 1e6, 3),
        "yielded_to": w.yielded_to,
        "detail": w.reason.sentence,
    }


def short_told(reason: Reason, amount: float) -> str:
    """The figure behind a reason, in parentheses; nothing where it has none."""
    if reason not in _SHORT_IN:
        return ""
    scale = 1e-6 if reason in (Reason.FAIR_SHARE, Reason.BACK_OFF) else 1.0
    return f" ({_SHORT_IN[reason].format(amount * scale)})"


def event_told(history: History, record: npt.NDArray[np.void], origin: int) -> dict[str, Any]:
    """One record as an entry of a timeline that begins at `origin`, ns."""
    event, reason = Event(int(record["event"])), Reason(int(record["reason"]))
    detail = event.sentence
    if reason not in (Reason.NONE, Reason.SELECTED):
        detail += f": {reason.sentence}{short_told(reason, float(record['amount']))}"
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


def _counterfactuals(waits: list[Wait], limits: Limits | None) -> list[str]:
    """What would have let it run sooner, from the figures behind its longest waits."""
    told = []
    for w in waits[:3]:
        ms = w.ns / 1e6
        if w.reason in (Reason.NO_KV, Reason.WATERMARK) and w.short_by > 0:
            told.append(_with_more_blocks(w, limits))
        elif w.reason == Reason.NO_ROW:
            told.append(f"with a larger max_batch_size it would have waited up to {ms:.0f} ms less")
        elif w.reason == Reason.ADAPTER:
            told.append(f"with one more adapter slot it would have waited up to {ms:.0f} ms less")
        elif w.reason == Reason.FAIR_SHARE:
            told.append(f"with a larger weight for its tenant it would have waited up to {ms:.0f} ms less")
        elif w.reason in (Reason.NO_TIME, Reason.DECODE_BOUND):
            told.append(f"with looser TBT targets beside it, it would have waited up to {ms:.0f} ms less")
    return told


def _with_more_blocks(w: Wait, limits: Limits | None) -> str:
    """What a wait for KV blocks would have taken: where the watermark alone stood in the way, which one."""
    earlier = f"it could have run up to {w.slots} slots ({w.ns / 1e6:.0f} ms) earlier"
    short = f"it was {w.short_by:.0f} KV blocks short"
    if w.reason == Reason.WATERMARK and limits is not None:
        ratio = limits.watermark_ratio + w.short_by / limits.total_blocks
        if ratio <= 1.0:
            needed = (
                f"watermark_ratio {np.ceil(ratio * 100) / 100:.2f} instead of {limits.watermark_ratio:.2f}"
            )
            return f"{short}; with {needed} {earlier}"
    return f"{short}; with as many more {earlier}"


def _summary(story: Story, waits: list[Wait], total_ns: int) -> str:
    e, r = story.ending, story.request
    what = f"{r.id} ({r.tenant}/{r.cls.name}, {r.prompt_tokens} prompt tokens)"
    if e is None:
        state = "is still open"
    elif e.outcome == Outcome.COMPLETED:
        state = f"completed with {e.outputs} tokens and {'met its SLO' if e.attained else _missed(r, e)}"
    else:
        state = f"{e.outcome.sentence}: {e.reason.sentence}"
    text = f"{what} {state}; it waited {total_ns / 1e6:.0f} ms"
    if e is not None:
        text += f" of the {(e.ended_ns - e.arrival_ns) / 1e6:.0f} ms it took"
    if waits and total_ns > 0:
        text += f", {waits[0].ns / total_ns:.0%} of the wait because {waits[0].reason.sentence}"
    if e is not None and e.preemptions:
        text += f"; it was preempted {e.preemptions} times"
    return text + "."


def _missed(r: Request, e: Ending) -> str:
    """Which targets a completed request missed, and by how much."""
    missed = []
    first_ns, whole_ns = e.first_token_ns - e.arrival_ns, e.ended_ns - e.arrival_ns
    for what, took_ns, target_ns in (
        ("its first token came after", first_ns, r.ttft_target_ns),
        ("its last token came after", whole_ns, r.cls.deadline_ns),
    ):
        if target_ns is not None and took_ns > target_ns:
            missed.append(f"{what} {took_ns / 1e6:.0f} ms, {target_ns / 1e6:.0f} were allowed")
    if r.cls.tbt_ns is not None and e.late_gaps > allowed_late_gaps(r.max_tokens):
        missed.append(f"{e.late_gaps} gaps were longer than {r.cls.tbt_ns / 1e6:.0f} ms")
    if not missed:
        missed.append("it was demoted as it was not expected to make it")
    return f"missed its SLO ({'; '.join(missed)})"
