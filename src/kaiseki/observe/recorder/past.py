"""From a recording to the history that `explain` reads: the same facts, told again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy.typing as npt

from kaiseki.core.endings import Ending
from kaiseki.core.reasons import Finish, Outcome, Reason
from kaiseki.core.requests import Begun, OnLate, Request, ServiceClass
from kaiseki.observe.explain import BODY_ID_PREFIXES, explain
from kaiseki.observe.history import History, Limits, Story
from kaiseki.observe.recorder.layout import Kind
from kaiseki.observe.recorder.reading import Frame, Recording

DIGEST_BYTES = 32


class Submitted(NamedTuple):
    """A request as it was submitted, its arrival sequence, row, index of its tenant, and why it was refused.

    `whole`: its digests are all there.
    """

    request: Request
    seq: int
    row: int
    tenant: int
    refusal: Reason | None
    numbers: dict[str, float]
    whole: bool


def submitted(sections: dict[str, npt.NDArray[Any]]) -> Iterator[Submitted]:
    """The requests in a frame that has some."""
    texts, at = sections["texts"].tobytes(), 0
    data = sections["digests"].tobytes() if "digests" in sections else b""
    digests = tuple(data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES))
    for record in sections["requests"]:
        text = json.loads(texts[at : at + int(record["text_bytes"])])
        at += int(record["text_bytes"])
        yield _submitted(record, text, digests)


def _submitted(record: Any, text: dict[str, Any], digests: tuple[bytes, ...]) -> Submitted:
    ttft, cls, begun = int(record["ttft_ns"]), text["class"], text.get("begun")
    request = Request(
        id=text["id"],
        prompt_tokens=int(record["prompt"]),
        max_tokens=int(record["max_tokens"]),
        tenant=text["tenant"],
        cls=ServiceClass(**cls | {"on_late": OnLate(cls["on_late"])}),
        arrival_ns=int(record["arrival_ns"]),
        min_tokens=int(record["min_tokens"]),
        priority=int(record["priority"]),
        block_hashes=digests,
        fork_of=text.get("fork_of"),
        ttft_ns=None if ttft < 0 else ttft,
        hands_over=bool(record["hands_over"]),
        begun=None if begun is None else Begun(**begun),
        adapter=text.get("adapter"),
    )
    reason = Reason(int(record["reason"]))
    return Submitted(
        request, int(record["seq"]), int(record["row"]), int(record["tenant"]),
        None if reason == Reason.NONE else reason, text.get("numbers", {}),
        len(digests) == text.get("pages", 0),
    )  # fmt: skip


def endings(sections: dict[str, npt.NDArray[Any]], name_of: dict[int, str]) -> Iterator[Ending]:
    """The endings in a frame, of requests whose names by arrival sequence are known."""
    for record in sections["endings"].tolist():
        row, seq, tenant, cls, outcome, finish, reason, *rest = record
        if seq in name_of:
            how = Outcome(outcome), Finish(finish), Reason(reason)
            yield Ending(name_of[seq], row, seq, tenant, cls, *how, *rest)


def explain_recorded(recording: Recording, request_id: str) -> dict[str, Any] | None:
    """The explain document of a recorded request; None when nothing of it is recorded."""
    history = history_of(recording)
    for name in (request_id, *(request_id.removeprefix(prefix) for prefix in BODY_ID_PREFIXES)):
        found = explain(history, name, recording.last_ns)
        if found is not None:
            return found
    return None


def history_of(recording: Recording) -> History:
    """Everything that a recording tells of requests and slots."""
    frames = [(frame, frame.sections()) for frame in recording.frames]
    limits = recording.about.get("limits")
    history = History(*_sizes(frames), limits=None if limits is None else Limits(**limits))
    names: dict[int, str] = {}
    for i, (frame, found) in enumerate(frames):
        if frame.kind in (Kind.OPENED, Kind.KEYFRAME):
            for s in submitted(found):
                if s.seq not in names:
                    names[s.seq] = s.request.id
                    history.opened(Story(s.request, s.seq, s.tenant))
        if frame.kind == Kind.REFUSED:
            for s in submitted(found):
                refused = Story(s.request, -1, refusal=s.refusal, numbers=s.numbers, refused_ns=frame.t_ns)
                history.opened(refused)
        if frame.kind == Kind.ENDED:
            for ending in endings(found, names):
                history.ended(ending)
        if "records" in found:
            history.records.extend(found["records"])
        if frame.kind == Kind.DECIDED or (frame.kind == Kind.KEYFRAME and i == 0):
            history.cutoffs.extend(found["cutoffs"])
        if frame.kind == Kind.DECIDED:
            history.slots.append(frame.slot, frame.t_ns)
    return history


def _sizes(frames: list[tuple[Frame, dict[str, npt.NDArray[Any]]]]) -> tuple[int, int]:
    """How many records and requests a history must keep for all of these."""
    records = sum(found["records"].size for _, found in frames if "records" in found)
    cutoffs = sum(found["cutoffs"].size for _, found in frames if "cutoffs" in found)
    requests = sum(found["requests"].size for _, found in frames if "requests" in found)
    return max(records, 4 * cutoffs, 2 * len(frames), 8), max(requests, 1)
