"""What whoever runs a scheduler tells the flight recorder.

One call per slot, per step and per event of a request; arrays are written as they are, and nothing is done
per row. Independent of the engine: the embedded one, vLLM's scheduler and the simulator use the same calls.
Nothing of a prompt or an output is taken, save the digests of a prompt's blocks.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kaiseki import __version__
from kaiseki.core.admission import Refusal
from kaiseki.core.decision import I32, Decision, StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.requests import Request, ServiceClass
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.table import Records
from kaiseki.core.trace import CUTOFF
from kaiseki.observe.recorder import state
from kaiseki.observe.recorder.layout import (
    PACK_DECISION,
    PACK_ENDING,
    PACK_REQUEST,
    PACK_STEP,
    Call,
    Kind,
)
from kaiseki.observe.recorder.ring import SUFFIX, Ring

_log = logging.getLogger(__name__)

DEFAULT_MB = 256
NAME = "replica-0"
_NO_ROWS = np.empty(0, np.int32)


class Load(NamedTuple):
    """How things stand after a decision: requests, and KV blocks."""

    running: int
    waiting: int
    free_blocks: int
    live_blocks: int
    total_blocks: int


def load_of(scheduler: Scheduler) -> Load:
    """How things stand."""
    kv = scheduler.kv
    waiting = len(scheduler.waiting)
    return Load(scheduler.table.running_count, waiting, kv.free_blocks(), kv.live_blocks(), kv.total_blocks)


def facts_of(scheduler: Scheduler) -> dict[str, Any]:
    """What readers want to know of a scheduler: policy, settings, weights of tenants, limits."""
    fair, settings = scheduler.fairness, scheduler.settings
    weights = dict(zip(fair.names, fair.weight.tolist(), strict=False))
    limits = {"total_blocks": scheduler.kv.total_blocks, "watermark_ratio": settings.watermark_ratio}
    policy = {"name": scheduler.policy.name, "settings": asdict(scheduler.policy)}
    return {"policy": policy, "settings": asdict(settings), "weights": weights, "limits": limits}


class FlightRecorder:
    """Writes down what a scheduler is told, decides and achieves. All calls from one thread.

    Without a ring every call returns at once.

    Args:
        ring: where to, or None.
        about: facts for whoever reads it (engine, model), as JSON can hold them.
        scheduler: whose settings and state go into keyframes; None where it is not one of ours.
        replayable: whether to keep the state, so that a replay can begin at each keyframe.
    """

    def __init__(
        self,
        ring: Ring | None,
        about: Mapping[str, Any] | None = None,
        scheduler: Scheduler | None = None,
        replayable: bool = True,
    ) -> None:
        self._ring = ring
        self._about = {"version": __version__, **(about or {})}
        self._scheduler = scheduler
        self._replayable = replayable
        self._open: dict[int, tuple[bytes, bytes]] = {}  # by arrival sequence: REQUEST and its text
        self._cutoffs: list[Records] = [
            np.empty(0, CUTOFF)
        ]  # since the last keyframe, with those in force at it
        self._classes: dict[ServiceClass, str] = {}  # as JSON
        self._keyframe_at = 0

    @classmethod
    def open(
        cls,
        folder: Path,
        now_ns: int,
        size_mb: float = DEFAULT_MB,
        about: Mapping[str, Any] | None = None,
        scheduler: Scheduler | None = None,
        name: str = NAME,
    ) -> FlightRecorder:
        """Record into `folder/name.ring`; the last run's is kept as `name.previous.ring`.

        Where that is not possible (no room, no right to, another process records there) a warning is
        logged, and nothing is recorded.

        Args:
            folder: made when it is not there.
            now_ns: time by the clock of all later calls.
            size_mb: of the file, taken at once; the oldest makes room for the newest.
            about, scheduler: see the class.
            name: of the replica or rank, where several share a folder.
        """
        try:
            ring = Ring.in_file(folder / f"{name}{SUFFIX}", size_mb, now_ns)
        except OSError as error:
            _log.warning("nothing is recorded: %s: %s", folder, error.strerror or error)
            return cls(None)
        recorder = cls(ring, about, scheduler)
        recorder.keyframe(now_ns, 0)
        return recorder

    @classmethod
    def in_memory(
        cls,
        now_ns: int,
        size_mb: float,
        about: Mapping[str, Any] | None = None,
        scheduler: Scheduler | None = None,
        replayable: bool = False,
    ) -> FlightRecorder:
        """Record for as long as the process lives; see `open`."""
        recorder = cls(Ring.in_memory(size_mb, now_ns), about, scheduler, replayable)
        recorder.keyframe(now_ns, 0)
        return recorder

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._ring is not None

    @property
    def ring(self) -> Ring | None:
        """What is written to."""
        return self._ring

    # ------------------------------------------------------------------ slots

    def decided(
        self,
        decision: Decision,
        now_ns: int,
        records: Records,
        cutoffs: Records,
        load: Load,
        work_limit: int | None = None,
        spent_ns: int = -1,
        quantum_tokens: int = 0,
    ) -> None:
        """A slot was decided.

        Args:
            decision: its arrays must be contiguous.
            now_ns, work_limit: what `Scheduler.decide` was given.
            records, cutoffs: what `Trace.drain` gave after it.
            load: how things stand now.
            spent_ns: measured time to decide, -1 when it was not measured.
            quantum_tokens: grid of prompt chunks that it was made with.
        """
        if self._ring is None:
            return
        d = decision
        limit = -1 if work_limit is None else work_limit
        self._ring.append(
            Kind.DECIDED, d.slot, now_ns,
            PACK_DECISION.pack(limit, spent_ns, d.predicted_ns, d.bound_ns, quantum_tokens, *load),
            d.rows, d.tokens, d.starts, d.samples, d.preempted, records,
            cutoffs,
        )  # fmt: skip
        if cutoffs.size:
            self._cutoffs.append(cutoffs)

    def applied(self, result: StepResult, spent_ns: int = -1) -> None:
        """A step's result was taken in.

        Args:
            result: as it was given to `Scheduler.apply`.
            spent_ns: what was given to `Quantum.observe`: measured time to decide and apply, or -1.
        """
        if self._ring is None:
            return
        r = result
        step = PACK_STEP.pack(r.started_ns, r.ended_ns, spent_ns)
        self._ring.append(
            Kind.APPLIED, r.slot, r.ended_ns, step, r.new_tokens, r.finish, r.failed, r.retryable
        )

    def noted(self, records: Records, now_ns: int) -> None:
        """Records that belong to no decision: what a result, or a call between slots, did."""
        if self._ring is not None and records.size:
            self._ring.append(Kind.NOTED, int(records["slot"][-1]), now_ns, records)

    # ------------------------------------------------------------------ requests

    def opened(self, request: Request, seq: int, row: int, tenant: int, now_ns: int, slot: int = 0) -> None:
        """A request was accepted, with this arrival sequence, row and index of its tenant."""
        if self._ring is None:
            return
        kept = self._request(request, seq, row, tenant, 0, {})
        self._open[seq] = kept
        digests = b"".join(request.block_hashes)
        # A prompt whose digests don't fit is kept without; its text says how many there were.
        if not self._ring.append(Kind.OPENED, slot, now_ns, *kept, digests):
            self._ring.append(Kind.OPENED, slot, now_ns, *kept, b"")

    def refused(self, request: Request, refusal: Refusal, now_ns: int, slot: int = 0) -> None:
        """A request was refused at once."""
        if self._ring is not None:
            kept = self._request(request, -1, -1, -1, int(refusal.reason), refusal.numbers)
            self._ring.append(Kind.REFUSED, slot, now_ns, *kept)

    def ended(self, endings: Sequence[Ending], slot: int = 0) -> None:
        """Requests ended."""
        if self._ring is None or not endings:
            return
        for ending in endings:
            self._open.pop(ending.seq, None)
        last_ns = max(ending.ended_ns for ending in endings)
        self._ring.append(Kind.ENDED, slot, last_ns, b"".join([PACK_ENDING.pack(*e[1:]) for e in endings]))

    def called(
        self,
        call: Call,
        now_ns: int,
        rows: I32 = _NO_ROWS,
        values: Sequence[float] = (),
        text: str = "",
        slot: int = 0,
    ) -> None:
        """The scheduler was told something else that a replay has to tell it, too.

        Args:
            call: what; the others are its arguments.
            now_ns: when.
            rows: int32[n].
            values: one per row, or the only number.
            text: a name.
            slot: the last one.
        """
        if self._ring is not None:
            which = np.array([call], np.int32)
            numbers = np.array(values, np.float64)
            self._ring.append(Kind.CALLED, slot, now_ns, which, rows, numbers, text.encode())

    # ------------------------------------------------------------------ keyframes

    @property
    def due(self) -> bool:
        """Whether a keyframe should be written: four of them fit into the ring with what is between."""
        return self._ring is not None and self._ring.offset - self._keyframe_at >= self._ring.largest_bytes

    def keyframe(self, now_ns: int, slot: int) -> None:
        """Write what a reader needs who begins here: settings, open requests, cutoffs, the core's state.

        With decisions in flight or not, but with the trace and the endings drained.
        """
        if self._ring is None:
            return
        about = self._about if self._scheduler is None else facts_of(self._scheduler) | self._about
        parts = (
            json.dumps(about, default=str).encode(),
            b"".join(request for request, _ in self._open.values()),
            b"".join(text for _, text in self._open.values()),
            self._in_force(),
        )
        data = self._state()
        if not self._ring.append(Kind.KEYFRAME, slot, now_ns, *parts, data):
            _log.warning("a keyframe of %d KB is too large for a recording of this size", len(data) >> 10)
            self._ring.append(Kind.KEYFRAME, slot, now_ns, *parts, b"")
        self._keyframe_at = self._ring.offset

    def close(self) -> None:
        """Write everything to the disk; nothing is recorded afterwards."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    # ------------------------------------------------------------------ in pieces

    def _state(self) -> bytes:
        if self._scheduler is None or not self._replayable:
            return b""
        try:
            return state.dump(self._scheduler)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            _log.warning("this recording can be explained but not replayed: %s", error)
            self._replayable = False
            return b""

    def _in_force(self) -> Records:
        """CUTOFF[n]: the last of each tenant."""
        newest_first = np.concatenate(self._cutoffs)[::-1]
        _, last = np.unique(newest_first["tenant"], return_index=True)
        self._cutoffs = [newest_first[last]]
        return self._cutoffs[0]

    def _request(
        self, r: Request, seq: int, row: int, tenant: int, reason: int, numbers: Mapping[str, float]
    ) -> tuple[bytes, bytes]:
        """REQUEST as bytes, and its text."""
        cls = self._classes.get(r.cls)
        if cls is None:
            cls = self._classes[r.cls] = json.dumps(asdict(r.cls))
        text = f'{{"id":{json.dumps(r.id)},"tenant":{json.dumps(r.tenant)},"class":{cls}'
        if r.block_hashes:
            text += f',"pages":{len(r.block_hashes)}'
        begun = None if r.begun is None else asdict(r.begun)
        more = {"fork_of": r.fork_of, "adapter": r.adapter, "begun": begun, "numbers": dict(numbers)}
        for key, value in more.items():
            if value:
                text += f',"{key}":{json.dumps(value)}'
        data = f"{text}}}".encode()
        record = PACK_REQUEST.pack(
            seq, row, tenant, _i32(r.prompt_tokens), _i32(r.max_tokens), _i32(r.min_tokens), _i32(r.priority),
            r.arrival_ns,
            -1 if r.ttft_ns is None else r.ttft_ns,
            reason, r.hands_over, len(data),
        )  # fmt: skip
        return record, data


def _i32(number: int) -> int:
    """What a refused request asked for may be any number; the record has the nearest that it can hold."""
    return max(-(2**31), min(number, 2**31 - 1))
