"""Doing again what was recorded: a scheduler gets the recorded inputs, and must decide the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kaiseki.core.decision import F64, Decision, StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.table import Records
from kaiseki.observe.recorder import state
from kaiseki.observe.recorder.layout import Call, Kind
from kaiseki.observe.recorder.past import submitted
from kaiseki.observe.recorder.reading import Frame, Recording

COMPARED = ("rows", "tokens", "starts", "samples", "preempted")
"""Of each decision."""


class NotReplayable(ValueError):
    """The recording does not hold what a replay needs; the message says what."""


@dataclass(slots=True)
class Replayed:
    """What a replay found.

    Attributes:
        scheduler: as it is now.
        first_slot, last_slot: the part that was replayed.
        decisions: how many were made again.
        mismatch: slot and name of the first array that differs; nothing after that can be compared.
        steps: of each, when it ended, how long it took (ns), and float64[N_FEATURES] of its chunks.
        tokens: TOKEN[m] of each step, see `Applied`.
        endings: of requests, in order.
    """

    scheduler: Scheduler
    first_slot: int
    last_slot: int = 0
    decisions: int = 0
    mismatch: tuple[int, str] | None = None
    steps: list[tuple[int, int, F64]] = field(default_factory=list)
    tokens: list[Records] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)


def starts(recording: Recording) -> Iterator[int]:
    """Places among the frames at which a replay can begin, oldest first."""
    for i, frame in enumerate(recording.frames):
        if frame.kind == Kind.KEYFRAME and frame.sections()["state"].size:
            yield i


def replay(recording: Recording, begin: int | None = None) -> Replayed:
    """Make the recorded decisions again, up to the end or to the first that differs.

    Args:
        recording: with the state of its scheduler.
        begin: one of `starts`; the first one when not given.

    Raises:
        NotReplayable: there is nowhere to begin, or something is missing after that.
        UnreadableState: the state is of another version.
    """
    at = next(starts(recording), None) if begin is None else begin
    if at is None:
        raise NotReplayable(f"{recording.name}: no keyframe holds the scheduler's state")
    first = recording.frames[at]
    done = Replayed(state.load(first.sections()["state"].tobytes()), first.slot, first.slot)
    for frame in recording.frames[at + 1 :]:
        if frame.gap:
            raise NotReplayable(f"{recording.name}: damaged or overwritten after slot {done.last_slot}")
        if frame.kind == Kind.DECIDED:
            _decide(done, frame)
            if done.mismatch is not None:
                break
        else:
            _tell(done, frame)
        done.scheduler.trace.drain()
        done.endings += done.scheduler.take_endings()
    return done


def _decide(done: Replayed, frame: Frame) -> None:
    s, found = done.scheduler, frame.sections()
    recorded = found["decision"][0]
    limit = int(recorded["work_limit"])
    s.quantum.tokens = int(recorded["quantum_tokens"])
    decision = s.decide(frame.t_ns, None if limit < 0 else limit)
    done.decisions, done.last_slot = done.decisions + 1, decision.slot
    for name in COMPARED:
        if not np.array_equal(getattr(decision, name), found[name]):
            done.mismatch = decision.slot, name
            return


def _tell(done: Replayed, frame: Frame) -> None:
    """Everything that is no decision."""
    s, found = done.scheduler, frame.sections()
    if frame.kind == Kind.OPENED:
        for request in submitted(found):
            if not request.whole:
                raise NotReplayable(f"request {request.request.id}: its prompt's digests did not fit")
            s.submit(request.request, frame.t_ns)
    elif frame.kind == Kind.APPLIED:
        flight = s.outstanding(frame.slot)
        result = _result(flight.decision, found)
        done.steps.append((result.ended_ns, result.ended_ns - result.started_ns, flight.features))
        done.tokens.append(s.apply(result).tokens)
    elif frame.kind == Kind.CALLED:
        _call(s, frame, found)


def _result(decision: Decision, found: dict[str, npt.NDArray[Any]]) -> StepResult:
    step = found["step"][0]
    new_tokens = found["new_tokens"].copy()
    return StepResult(
        slot=decision.slot,
        rows=decision.rows,
        epochs=decision.epochs,
        new_tokens=new_tokens,
        token_ids=np.zeros(int(new_tokens.sum()), np.int32),
        finish=found["finish"].copy(),
        failed=found["failed"].copy(),
        retryable=found["retryable"].copy(),
        started_ns=int(step["started_ns"]),
        ended_ns=int(step["ended_ns"]),
    )


def _call(s: Scheduler, frame: Frame, found: dict[str, npt.NDArray[Any]]) -> None:
    call, now = Call(int(found["call"][0])), frame.t_ns
    rows, values, text = found["rows"].copy(), found["values"].copy(), found["text"].tobytes().decode()
    match call:
        case Call.CANCEL:
            s.cancel(text, now)
        case Call.FAIL:
            s.life.end(int(rows[0]), Outcome.FAILED, Reason(int(values[0])), now)
        case Call.BACK_OFF:
            s.life.back_off(rows, values, now)
        case Call.COME_BACK:
            s.life.come_back(rows, now)
        case Call.LANDED:
            s.landed(text, now)
        case Call.HANDED_OVER:
            s.handed_over(text)
        case Call.SET_WEIGHT:
            s.set_tenant(text, float(values[0]))
