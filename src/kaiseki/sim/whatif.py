"""What if: the requests of a recording under another policy or other settings, on a simulated engine.

Steps take what the recorded cost model says, times how far the recorded steps of that moment were off from
it. A request's output is as long as it was; where it did not end by itself, as long as usual in its class.
"""

from __future__ import annotations

import copy
import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from kaiseki.core.admission import Refusal
from kaiseki.core.costs import predict_ns
from kaiseki.core.decision import F64, I32, I64, Bool, Decision, StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.policy import Policy
from kaiseki.core.protocols import (
    F_CHUNKS,
    F_CONTEXT,
    F_DECODES,
    F_PAIRS,
    F_PREFIX,
    F_SLOT,
    F_TOKENS,
    N_FEATURES,
)
from kaiseki.core.reasons import Finish, Outcome
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import Records
from kaiseki.memory.pool import BlockPool
from kaiseki.observe.recorder import state
from kaiseki.observe.recorder.layout import Call, Kind
from kaiseki.observe.recorder.past import Submitted, endings, submitted
from kaiseki.observe.recorder.reading import Recording
from kaiseki.observe.recorder.replay import NotReplayable, Replayed, replay, starts
from kaiseki.sim.loop import STUCK_NS, Stuck

RETRY_NS = 1_000_000
"""When nothing could be granted though requests are open, the next look comes so much later."""


class Asked(NamedTuple):
    """A request of the recording: when it came, how long its output is, when its client left, if it did.

    `counted`: it came after the replay's beginning, so that both lives of it are whole.
    """

    request: Request
    at_ns: int
    outputs: int
    leaves_ns: int | None
    counted: bool


@dataclass(slots=True)
class Fared:
    """How requests fared: with how each ended, or why it was refused.

    Attributes:
        endings, refusals: of requests that count, by id.
        tokens: TOKEN[m] of each step.
        decisions: how many were made.
    """

    endings: dict[str, Ending] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    tokens: list[Records] = field(default_factory=list)
    decisions: int = 0


class Recorded:
    """A recording, replayed once: what was asked, how it fared, and how long steps take.

    Args:
        recording: with the state of its scheduler.

    Raises:
        NotReplayable, UnreadableState: see `replay`.
    """

    def __init__(self, recording: Recording) -> None:
        begin = next(starts(recording), None)
        if begin is None:
            raise NotReplayable(f"{recording.name}: no keyframe holds the scheduler's state")
        frames = recording.frames
        self._state = frames[begin].sections()["state"].tobytes()
        self.begin_ns = frames[begin].t_ns
        self.replayed: Replayed = replay(recording, begin)
        self.asked = _asked(recording, begin)
        counted = {a.request.id for a in self.asked if a.counted}
        self.fared = Fared(
            {e.request_id: e for e in self.replayed.endings if e.request_id in counted},
            {s.request.id: _refusal(s) for s in _refused(recording, begin)},
            self.replayed.tokens,
            self.replayed.decisions,
        )

    @property
    def policy(self) -> Policy:
        """Under which it was recorded."""
        return self.replayed.scheduler.policy

    @property
    def settings(self) -> SchedulerSettings:
        """With which it was recorded."""
        return self.replayed.scheduler.settings

    def under(self, policy: Policy, settings: SchedulerSettings) -> Fared:
        """The same requests under another policy and other settings."""
        origin = state.load(self._state)
        kv = origin.kv
        pool = BlockPool(kv.total_blocks, kv.block_tokens)
        made = Scheduler(policy, pool, origin.cost, origin.capabilities, settings, self.begin_ns)
        for cls in origin.life.classes:  # so that indices are the same
            made.life.class_index(cls)
        for name, weight in zip(origin.fairness.names, origin.fairness.weight.tolist(), strict=False):
            made.set_tenant(name, weight)
        return _Run(made, _StepTimes(self.replayed), self.asked, self.begin_ns).run()


class _StepTimes:
    """How long a step takes: the learned model, times how far off it was at that moment of the recording."""

    def __init__(self, replayed: Replayed) -> None:
        self._planes = copy.deepcopy(replayed.scheduler.cost).planes()
        self._ended_ns: I64 = np.array([ended for ended, _, _ in replayed.steps], np.int64)
        predicted = np.array([predict_ns(self._planes, features) for _, _, features in replayed.steps])
        took = np.array([ns for _, ns, _ in replayed.steps], np.float64)
        self._off: F64 = took / np.maximum(predicted, 1.0)

    def took_ns(self, features: F64, now: int) -> int:
        """Of a step with these features that begins now."""
        predicted = predict_ns(self._planes, features)
        if not self._off.size:
            return int(predicted)
        at = min(int(np.searchsorted(self._ended_ns, now)), self._off.size - 1)
        return max(1, int(predicted * self._off[at]))


class _Run:
    """One replica and its engine on virtual time."""

    def __init__(self, scheduler: Scheduler, times: _StepTimes, asked: list[Asked], now: int) -> None:
        self._s, self._times, self._now = scheduler, times, now
        self._coming = deque(sorted(asked, key=lambda a: a.at_ns))
        self._counted = {a.request.id for a in asked if a.counted}
        self._leaving: list[tuple[int, str]] = []
        self._prompts, self._outputs = np.zeros((2, 256), np.int32)
        self._steps: deque[StepResult] = deque()
        self._free_ns = now
        self._fared = Fared()

    def run(self) -> Fared:
        """Until everything has come and ended.

        Raises:
            Stuck: requests are left that never get anything.
        """
        while True:
            due = [self._coming[0].at_ns] if self._coming else []
            due += [self._leaving[0][0]] if self._leaving else []
            if self._steps:
                due.append(self._steps[0].ended_ns)
            elif self._s.table.open_rows:
                due.append(self._now + RETRY_NS)
            if not due:
                return self._fared
            self._now = max(self._now, min(due))
            self._take_in()
            self._decide()
            if self._now - self._free_ns > STUCK_NS and self._s.table.open_rows:
                raise Stuck(f"{self._s.table.open_rows} requests are open and get nothing")

    def _take_in(self) -> None:
        """Everything that is due by now."""
        s = self._s
        while self._coming and self._coming[0].at_ns <= self._now:
            self._submit(self._coming.popleft())
        while self._steps and self._steps[0].ended_ns <= self._now:
            self._fared.tokens.append(s.apply(self._steps.popleft()).tokens)
            s.trace.drain()
        while self._leaving and self._leaving[0][0] <= self._now:
            s.cancel(heapq.heappop(self._leaving)[1], self._now)
        self._note_endings()

    def _submit(self, asked: Asked) -> None:
        request = asked.request
        refusal = self._s.submit(request, self._now)
        if refusal is not None:
            if asked.counted:
                self._fared.refusals[request.id] = refusal
            return
        row = self._s.life.ids[request.id]
        if row >= self._prompts.size:
            more = np.zeros(max(row + 1, 2 * self._prompts.size) - self._prompts.size, np.int32)
            self._prompts = np.concatenate([self._prompts, more])
            self._outputs = np.concatenate([self._outputs, more])
        self._prompts[row], self._outputs[row] = request.prompt_tokens, asked.outputs
        if asked.leaves_ns is not None:
            heapq.heappush(self._leaving, (max(asked.leaves_ns, self._now), request.id))

    def _decide(self) -> None:
        s = self._s
        while s.in_flight <= s.capabilities.depth and s.table.open_rows:
            decision = s.decide(self._now)
            s.trace.drain()
            self._note_endings()
            self._fared.decisions += 1
            if decision.empty:
                return
            self._execute(decision)

    def _execute(self, d: Decision) -> None:
        n = d.rows.size
        prompts: I32 = self._prompts[d.rows]
        ends = d.starts + d.tokens
        started = max(self._now, self._free_ns)
        features = features_of(d.starts, d.tokens, (d.starts >= prompts) & (d.tokens == 1))
        self._free_ns = started + self._times.took_ns(features, started)
        last: Bool = d.samples & (ends - prompts + 1 >= self._outputs[d.rows])
        none = np.zeros(n, np.bool_)
        self._steps.append(
            StepResult(
                slot=d.slot,
                rows=d.rows,
                epochs=d.epochs,
                new_tokens=d.samples.astype(np.int32),
                token_ids=np.zeros(int(d.samples.sum()), np.int32),
                finish=np.where(last, np.int8(Finish.STOP), np.int8(0)),
                failed=none,
                retryable=none,
                started_ns=started,
                ended_ns=self._free_ns,
            )
        )

    def _note_endings(self) -> None:
        for ending in self._s.take_endings():
            if ending.request_id in self._counted:
                self._fared.endings[ending.request_id] = ending


def features_of(starts: I32, tokens: I32, decodes: Bool) -> F64:
    """float64[N_FEATURES] of a chunk set, as `add_decode` and `add_prefill` count it."""
    first, n = starts[~decodes].astype(np.float64), tokens[~decodes].astype(np.float64)
    out = np.zeros(N_FEATURES)
    out[F_SLOT], out[F_DECODES] = 1.0, np.count_nonzero(decodes)
    out[F_CONTEXT] = (starts[decodes].astype(np.float64) + 1.0).sum()
    out[F_CHUNKS], out[F_TOKENS], out[F_PREFIX] = n.size, n.sum(), first.sum()
    out[F_PAIRS] = (n * (first + (n + 1.0) / 2.0)).sum()
    return out


def _refused(recording: Recording, begin: int) -> list[Submitted]:
    return [
        s
        for frame in recording.frames[begin:]
        if frame.kind == Kind.REFUSED
        for s in submitted(frame.sections())
    ]


def _refusal(s: Submitted) -> Refusal:
    assert s.refusal is not None
    return Refusal(s.refusal, s.numbers)


def _asked(recording: Recording, begin: int) -> list[Asked]:
    """What was asked from a frame on, those that were open then first."""
    came: list[tuple[Submitted, int, bool]] = []
    names: dict[int, str] = {}
    ended: dict[str, Ending] = {}
    left: dict[str, int] = {}
    for i, frame in enumerate(recording.frames[begin:]):
        found = frame.sections()
        if frame.kind in (Kind.OPENED, Kind.REFUSED) or (frame.kind == Kind.KEYFRAME and i == 0):
            for s in submitted(found):
                came.append((s, frame.t_ns, frame.kind != Kind.KEYFRAME))
                names[s.seq] = s.request.id
        elif frame.kind == Kind.ENDED:
            ended.update((e.request_id, e) for e in endings(found, names))
        elif frame.kind == Kind.CALLED and found["call"][0] == Call.CANCEL:
            left[found["text"].tobytes().decode()] = frame.t_ns
    usual = _usual_outputs(came, ended)
    return [
        Asked(
            replace(s.request, fork_of=None) if s.refusal is not None else s.request,
            at_ns, _outputs(s.request, ended.get(s.request.id), usual), left.get(s.request.id), counted,
        )
        for s, at_ns, counted in came
    ]  # fmt: skip


def _usual_outputs(came: list[tuple[Submitted, int, bool]], ended: dict[str, Ending]) -> dict[str, int]:
    """Median output of completed requests, by class."""
    lengths = defaultdict(list)
    for s, _, _ in came:
        ending = ended.get(s.request.id)
        if ending is not None and ending.outcome == Outcome.COMPLETED:
            lengths[s.request.cls.name].append(ending.outputs)
    return {name: int(median(values)) for name, values in lengths.items()}


def _outputs(request: Request, ending: Ending | None, usual: dict[str, int]) -> int:
    if ending is not None and ending.outcome == Outcome.COMPLETED:
        return ending.outputs
    known = 0 if ending is None else ending.outputs
    guess = usual.get(request.cls.name, request.max_tokens)
    return min(max(known, request.min_tokens, guess, 1), request.max_tokens)
