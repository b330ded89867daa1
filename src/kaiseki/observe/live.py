"""What a live view shows: the last slots chunk by chunk, who holds what, and why others wait.

Everything comes from arrays that are bounded, so that looking costs the same however many wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kaiseki.core.decision import I64, Decision, StepResult
from kaiseki.core.reasons import Event, Reason
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.table import State
from kaiseki.observe.history import History, Ring, Story

CHUNK = np.dtype([("slot", np.int64), ("seq", np.int64), ("tokens", np.int32), ("sampled", np.bool_)])
STEP = np.dtype([("slot", np.int64), ("started_ns", np.int64), ("ended_ns", np.int64)])
MARKED = (Event.ADMITTED, Event.PASSED_OVER, Event.PREEMPTED, Event.PAUSED, Event.RESUMED, Event.RETRIED)
"""Events that change what a request's lane looks like."""
MOST_RUNNING = 256
MOST_WAITING = 64
MOST_SLOTS = 512

Records = npt.NDArray[np.void]


class Slots:
    """The last slots: what ran in them and when. Written by the driver's thread, once per slot."""

    def __init__(self, chunks: int = 1 << 15, steps: int = 1 << 11) -> None:
        self._chunks = Ring(CHUNK, chunks)
        self._steps = Ring(STEP, steps)

    def decided(self, decision: Decision, seqs: I64) -> None:
        """A slot was decided; `seqs` are the arrival sequences of its rows."""
        chunks: Records = np.empty(decision.rows.size, CHUNK)
        chunks["slot"], chunks["seq"] = decision.slot, seqs
        chunks["tokens"], chunks["sampled"] = decision.tokens, decision.samples
        self._chunks.extend(chunks)

    def stepped(self, result: StepResult) -> None:
        """A slot was executed."""
        self._steps.append(result.slot, result.started_ns, result.ended_ns)

    def since(self, slot: int) -> tuple[Records, Records]:
        """STEP[n] and CHUNK[m] of executed slots after `slot`, the last MOST_SLOTS of them."""
        steps = self._steps.newest(MOST_SLOTS)
        steps = steps[steps["slot"] > slot]
        chunks = self._chunks.read()
        wanted = steps["slot"]
        if not wanted.size:
            return steps, chunks[:0]
        return steps, chunks[(chunks["slot"] >= wanted[0]) & (chunks["slot"] <= wanted[-1])]


class Shown(NamedTuple):
    """A request that the view has a lane for."""

    row: int
    story: Story


class Live:
    """Makes the documents of one view, each about what is new since the one before.

    Args:
        scheduler, history, slots: what to look at; the caller holds the driver's lock.
        tenant: whose part to show, None for everything.
    """

    def __init__(self, scheduler: Scheduler, history: History, slots: Slots, tenant: str | None) -> None:
        self._s, self._history, self._slots = scheduler, history, slots
        self._tenant = tenant

    def document(self, since: int, now_ns: int) -> dict[str, Any]:
        """What changed after slot `since`, and how things stand.

        Returns:
            `slots` as [slot, started_ms, ended_ms, [[request, tokens, sampled], …]], `tokens` computed in
            them by tenant, `marks` as [t_ms, request, event, reason], `requests` with a lane each, `queue`
            by tenant and reason, `kv` with the blocks held by each shown request. Times are on the
            engine's clock, like `now_ms`.
        """
        shown = [*self._running(), *self._waiting()]
        names = {x.story.seq: x.story.request.id for x in shown}
        steps, chunks = self._slots.since(since)
        ran = self._ran(chunks)
        tokens: Counter[str] = Counter()
        for seq, count in zip(chunks["seq"].tolist(), chunks["tokens"].tolist(), strict=True):
            if seq in ran:
                tokens[ran[seq].request.tenant] += count
        return {
            "now_ms": round(now_ns / 1e6, 3),
            "slot": int(steps["slot"][-1]) if steps.size else since,
            "slots": list(self._steps(steps, chunks, {seq: x.request.id for seq, x in ran.items()})),
            "tokens": tokens,
            "marks": list(self._marks(since, names)),
            "requests": [self._lane(x, now_ns) for x in shown],
            "queue": list(self._queue()),
            "kv": self._kv(shown),
        }

    def _mine(self, story: Story | None) -> bool:
        return story is not None and self._tenant in (None, story.request.tenant)

    def _running(self) -> list[Shown]:
        """Running requests, the longest running first."""
        t = self._s.table
        rows = t.running_rows()
        order = np.argsort(t.admitted_seq[rows], kind="stable")
        found = []
        for row in rows[order].tolist():
            story = self._history.story_of(int(t.seq[row]))
            if story is not None and self._mine(story):
                found.append(Shown(row, story))
            if len(found) == MOST_RUNNING:
                break
        return found

    def _waiting(self) -> list[Shown]:
        """Waiting requests that were looked at or came last: who is next, not everybody."""
        t, ids = self._s.table, self._s.life.ids
        seqs = self._history.records.newest(8 * MOST_RUNNING)["seq"]
        latest = np.unique(seqs)[::-1]
        found = []
        for seq in latest.tolist():
            story = self._history.story_of(seq)
            row = ids.get(story.request.id) if story is not None and self._mine(story) else None
            if story is not None and row is not None and t.seq[row] == seq and _waits(int(t.state[row])):
                found.append(Shown(row, story))
            if len(found) == MOST_WAITING:
                break
        return sorted(found, key=lambda x: x.story.seq)

    def _lane(self, shown: Shown, now_ns: int) -> dict[str, Any]:
        t, (row, story) = self._s.table, shown
        r, reason = story.request, Reason(int(t.last_reason[row]))
        running = t.state[row] == State.RUNNING
        return {
            "request": r.id,
            "tenant": r.tenant,
            "class": r.cls.name,
            "state": State(int(t.state[row])).name.lower(),
            "prompt_tokens": r.prompt_tokens,
            "computed_tokens": int(t.computed[row]),
            "output_tokens": int(t.outputs[row]),
            "preemptions": int(t.preemptions[row]),
            "demoted": bool(t.demoted[row]),
            "age_ms": round((now_ns - r.arrival_ns) / 1e6, 1),
            "reason": None if running else self._why(int(t.tenant[row]), reason).label,
        }

    def _why(self, tenant: int, own: Reason) -> Reason:
        """Why a request waits: its own reason where it was looked at, else where its queue was cut."""
        if own not in (Reason.NONE, Reason.SELECTED):
            return own
        cuts = self._s.trace.cuts(len(self._s.fairness.names))
        code = int(cuts["reason"][tenant])
        return Reason(code) if code >= 0 else Reason.SLOT_RUNNING

    def _queue(self) -> Iterator[dict[str, Any]]:
        """How many of each tenant wait, and what its queue was last cut by."""
        s = self._s
        for i, name in enumerate(s.fairness.names):
            if self._tenant not in (None, name):
                continue
            count = s.waiting.count(i)
            if count:
                reason = self._why(i, Reason.NONE)
                yield {"tenant": name, "waiting": count, "reason": reason.label, "detail": reason.sentence}

    def _kv(self, shown: list[Shown]) -> dict[str, Any]:
        """Blocks of the pool; shared ones are told for each request that has them."""
        kv, t = self._s.kv, self._s.table
        page = kv.block_tokens
        held = [
            [x.story.request.id, x.story.request.tenant, -(-int(t.computed[x.row]) // page)]
            for x in shown
            if t.state[x.row] == State.RUNNING
        ]
        return {
            "total_blocks": kv.total_blocks,
            "free_blocks": kv.free_blocks(),
            "live_blocks": kv.live_blocks(),
            "block_tokens": page,
            "held": held,
        }

    def _steps(self, steps: Records, chunks: Records, ids: dict[int, str]) -> Iterator[list[Any]]:
        at = np.searchsorted(chunks["slot"], steps["slot"], side="left")
        to = np.searchsorted(chunks["slot"], steps["slot"], side="right")
        for (slot, started, ended), first, last in zip(steps.tolist(), at.tolist(), to.tolist(), strict=True):
            part = chunks[first:last].tolist()
            ran = [[ids[seq], tokens, sampled] for _, seq, tokens, sampled in part if seq in ids]
            yield [slot, round(started / 1e6, 3), round(ended / 1e6, 3), ran]

    def _ran(self, chunks: Records) -> dict[int, Story]:
        """Requests with a chunk, by arrival sequence."""
        stories = {seq: self._history.story_of(seq) for seq in np.unique(chunks["seq"]).tolist()}
        return {seq: story for seq, story in stories.items() if story is not None and self._mine(story)}

    def _marks(self, since: int, names: dict[int, str]) -> Iterator[list[Any]]:
        records = self._history.records.newest(1 << 13)
        records = records[(records["slot"] > since) & np.isin(records["event"], MARKED)]
        for record in records[np.isin(records["seq"], list(names))].tolist():
            _, t_ns, seq, event, reason, _, _ = record
            yield [round(t_ns / 1e6, 3), names[seq], Event(event).label, Reason(reason).label]


def _waits(state: int) -> bool:
    return state in (State.WAITING, State.HELD, State.BACKING_OFF)
