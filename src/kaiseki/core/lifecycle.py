"""A request's way through the table: opened, queued, started, preempted, demoted, ended.

The only code that changes a row's state, so that table, queues, KV and counters always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kaiseki.core.adapters import Adapters, pin, unpin
from kaiseki.core.decision import F64, I32, Bool
from kaiseki.core.endings import ENDED, EVENT_OF, Ending, write_endings
from kaiseki.core.entries import ENTRY
from kaiseki.core.fairness import Fairness
from kaiseki.core.jit import kernel
from kaiseki.core.pace import Pace
from kaiseki.core.policy import Policy
from kaiseki.core.protocols import KVSpace
from kaiseki.core.queues import Waiting
from kaiseki.core.reasons import Event, Finish, Outcome, Reason
from kaiseki.core.requests import NEVER_NS, Begun, OnLate, Request, ServiceClass
from kaiseki.core.scan import FOUND, latest_start_ns
from kaiseki.core.scratch import Scratch
from kaiseki.core.switching import LinearSwitch
from kaiseki.core.table import NO_ROW, Records, RequestTable, State, View
from kaiseki.core.trace import Trace

_WAITING = int(State.WAITING)


class Buffers:
    """What a slot works on and nobody looks at afterwards."""

    def __init__(self) -> None:
        self.found = Scratch(FOUND)
        self.laid_out = Scratch(ENTRY)
        self.entries = Scratch(ENTRY)
        self.ended = Scratch(ENDED)


@dataclass(slots=True)
class Lifecycle:
    """Table, queues, KV, adapters and counters, and the transitions between states.

    `prefix_queried`, `prefix_hit`: prompt tokens of all admissions so far, and those that needed no computing
    as their KV was there. `switching`: where KV can go to host memory. `swapped`: rows that went there in
    this slot.
    """

    table: RequestTable
    waiting: Waiting
    kv: KVSpace
    fairness: Fairness
    trace: Trace
    policy: Policy
    pace: Pace
    adapters: Adapters
    switching: LinearSwitch | None = None
    rates: tuple[float, float, float] = (0.0, 0.0, 0.0)
    slot: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    ids: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    classes: list[ServiceClass] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    scratch: Buffers = field(default_factory=Buffers)
    swapped: list[int] = field(default_factory=list)
    _class_index: dict[ServiceClass, int] = field(default_factory=dict)
    _held: dict[int, list[int]] = field(default_factory=dict)
    _next_seq: int = 0
    _next_admission: int = 0

    def class_index(self, cls: ServiceClass) -> int:
        """Index of a service class, made when it is new."""
        index = self._class_index.get(cls)
        if index is None:
            index = self._class_index[cls] = len(self.classes)
            self.classes.append(cls)
        return index

    def open(self, request: Request, now: int) -> int:
        """Give an accepted request a row and a place in the queue."""
        t, cls, ttft = self.table, request.cls, request.ttft_target_ns
        row = t.take()
        t.seq[row], self._next_seq = self._next_seq, self._next_seq + 1
        t.tenant[row] = self.fairness.tenant(request.tenant)
        t.cls[row] = self.class_index(cls)
        t.tier[row], t.priority[row] = cls.tier + request.priority, request.priority
        t.weight[row], t.on_late[row] = cls.weight, cls.on_late
        t.arrival_ns[row] = request.arrival_ns
        t.ttft_ns[row] = NEVER_NS if ttft is None else ttft
        t.tbt_ns[row] = NEVER_NS if cls.tbt_ns is None else cls.tbt_ns
        t.deadline_ns[row] = NEVER_NS if cls.deadline_ns is None else cls.deadline_ns
        if request.adapter is not None:
            t.adapter[row] = self.adapters.index(request.adapter)
            self.waiting.tell_apart(len(self.adapters.names))
        t.prompt[row], t.max_tokens[row] = request.prompt_tokens, request.max_tokens
        t.min_tokens[row] = min(request.min_tokens, request.max_tokens)
        t.hands_over[row] = request.hands_over
        self.ids[request.id], self.names[row] = row, request.id
        self.kv.register(row, request.block_hashes)
        self.fairness.opened(int(t.tenant[row]))
        rows = np.array([row], np.int32)
        self.trace.note(
            self.slot, now, t.seq[rows], Event.SUBMITTED, Reason.NONE, float(request.prompt_tokens)
        )
        if request.begun is not None:
            self._go_on(row, request.begun)
            if request.begun.sent:
                self._expect(row, now)
                return row
        parent = self.ids.get(request.fork_of, NO_ROW) if request.fork_of is not None else NO_ROW
        alike = t.prompt[parent] == request.prompt_tokens and t.adapter[parent] == t.adapter[row]
        if parent != NO_ROW and alike:
            t.fork_of[row] = parent
            self._held.setdefault(parent, []).append(row)
            if t.confirmed[parent] < t.prompt[parent]:
                t.state[row] = State.HELD
                held = Reason.HELD_FOR_FORK
                self.trace.note(
                    self.slot, now, t.seq[rows], Event.PASSED_OVER, held, other=int(t.seq[parent])
                )
                return row
        t.state[row] = State.WAITING
        self.waiting.arrive(row, request.prompt_tokens)
        return row

    def _go_on(self, row: int, begun: Begun) -> None:
        """A request has tokens already."""
        t, last = self.table, begun.last_token_ns
        t.outputs[row], t.demoted[row], t.late_gaps[row] = begun.outputs, begun.demoted, begun.late_gaps
        t.first_token_ns[row] = begun.first_token_ns
        t.last_token_ns[row] = begun.first_token_ns if last is None else last

    def _expect(self, row: int, now: int) -> None:
        """Take blocks for the KV that comes, and for the position that is computed first."""
        t, rows = self.table, np.array([row], np.int32)
        self.kv.reserve(rows, np.zeros(1, np.int32), t.prompt[rows] + t.outputs[rows])
        t.state[row], t.brought[row] = State.COMING, True
        self.trace.note(self.slot, now, t.seq[rows], Event.PASSED_OVER, Reason.KV_COMING)

    def landed(self, row: int, now: int) -> None:
        """The KV of a row is here, but for its last token's: it waits for its turn like others."""
        t, rows = self.table, np.array([row], np.int32)
        self.kv.commit(rows, t.prompt[rows] + t.outputs[rows] - 1)
        self.come_back(rows, now)

    def handed_over(self, row: int) -> None:
        """Nobody reads the KV of a row that has ended here any more."""
        rows = np.array([row], np.int32)
        fences = self.table.inflight_slot[rows]
        self.kv.release(rows, fences)
        self._recycle(rows)

    def enqueue_arrivals(self) -> None:
        """Queue what has been opened: together, since many cost little more than one."""
        if self.waiting.arrivals:
            self.enqueue(self.waiting.take_arrivals())

    def view(self, rows: I32, uncached: I32 | None = None) -> View:
        """A policy's view of rows; `uncached` defaults to all that is known and not computed."""
        t = self.table
        left = t.prompt[rows] + t.outputs[rows] - t.computed[rows] if uncached is None else uncached
        slot_ns, token_ns, _ = self.rates
        pace, fair = self.pace, self.fairness
        return View(t, rows, left, slot_ns, token_ns, pace.slot_ns, pace.token_ns, fair.tokens, fair.weight)

    def enqueue(self, rows: I32) -> None:
        """Put rows that hold nothing into the waiting queue."""
        t, n = self.table, rows.size
        limits, left, latest = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n)
        find_known(t.records, rows, limits)
        cached = self.kv.cached_tokens(rows, limits)
        begin_waiting(t.records, rows, cached, self.policy.gives_up, *self.rates, left, latest)
        self.waiting.add(rows, self.policy.key(self.view(rows, left)), latest, left)

    def latest_start(self, rows: I32, uncached: I32) -> F64:
        """float64[n]: when each must start to meet its SLO, alone with best cache; inf without target.

        `uncached`: int32[n], tokens to compute before its next output token.
        """
        out = np.full(rows.size, np.inf)
        if self.policy.gives_up:
            latest_starts(self.table.records, rows, uncached, *self.rates, out)
        return out

    def start(self, rows: I32, starts: I32, now: int) -> None:
        """Waiting rows get their first chunk since they last waited; their KV is attached already."""
        t = self.table
        if self.policy.input_weight > 0.0:
            fresh = rows[t.admitted_ns[rows] < 0]  # what is computed again is no service
            self.fairness.count_tokens(t.tenant[fresh], t.prompt[fresh], self.policy.input_weight)
        self.waiting.take(rows)
        t.start_running(rows)
        if self.adapters.slots:
            pin(t.records, rows, self.adapters.records, self.slot)
        prompts, found = start_rows(t.records, rows, starts, self._next_admission, now)
        self._next_admission += rows.size
        self.prefix_queried += prompts
        self.prefix_hit += found

    def stop(self, rows: I32, state: State) -> None:
        """Running rows give up their KV and adapters; what is in flight for them becomes void."""
        self.kv.release(rows, self.table.inflight_slot[rows])
        if self.adapters.slots:
            unpin(self.table.records, rows, self.adapters.records)
        self.table.stop_running(rows, state)

    def preempt(
        self, rows: I32, event: Event, reason: Reason, now: int, amount: float = 0.0, other: int = -1
    ) -> None:
        """Stop running rows and queue them again; their KV is computed anew, or goes to host memory."""
        t = self.table
        if self.switching is not None and event == Event.PREEMPTED:
            again = rows[~self._swap_out(rows, self.switching)]
            t.recomputed[again] += t.confirmed[again]
        else:
            t.recomputed[rows] += t.confirmed[rows]
        t.preemptions[rows] += 1
        t.preempted_slot[rows] = self.slot
        self.trace.note(self.slot, now, t.seq[rows], event, reason, amount, other)
        self.stop(rows, State.WAITING)
        if self._held:
            for row in rows.tolist():
                self._release_held(row, now)
        self.enqueue(rows)

    def loss_ns(self, rows: I32, recompute_ns: F64) -> F64:
        """float64[n]: card time that stopping each running row costs, its KV moved or computed again."""
        if self.switching is None:
            return recompute_ns
        blocks = -(-self.table.confirmed[rows].astype(np.int64) // self.kv.block_tokens)
        return np.minimum(recompute_ns, self.switching.swap_ns(blocks))

    def _swap_out(self, rows: I32, switching: LinearSwitch) -> Bool:
        """bool[n]: of which rows the KV goes to host memory, as that costs less than computing it again."""
        t, kept = self.table, np.zeros(rows.size, np.bool_)
        blocks = -(-t.confirmed[rows].astype(np.int64) // self.kv.block_tokens)
        cheaper = switching.prefers_swap(blocks, self.view(rows, t.confirmed[rows]).lone_ns)
        if cheaper.any():
            chosen = rows[cheaper]
            kept[cheaper] = self.kv.swap_out(chosen, t.inflight_slot[chosen])
            self.swapped += rows[kept].tolist()
        return kept

    def back_off(self, rows: I32, wait_ns: F64, now: int) -> None:
        """Take waiting rows out of the queue, for so long; `come_back` puts them there again."""
        t = self.table
        self.trace.note(self.slot, now, t.seq[rows], Event.PASSED_OVER, Reason.BACK_OFF, wait_ns)
        self.waiting.take(rows)
        t.state[rows] = State.BACKING_OFF

    def come_back(self, rows: I32, now: int) -> None:
        """Queue rows that were put aside: backing off, or waiting for their KV."""
        self.trace.note(self.slot, now, self.table.seq[rows], Event.REKEYED, Reason.NONE)
        self.enqueue(rows)

    def demote(self, rows: I32, reason: Reason, now: int) -> None:
        """Rows become best effort: last in their tenant, and no target of theirs binds a slot any more."""
        t = self.table
        self.trace.note(self.slot, now, t.seq[rows], Event.DEMOTED, reason)
        t.demoted[rows] = True
        queued = rows[t.state[rows] == State.WAITING]
        if queued.size:
            self.waiting.take(queued)
            self.enqueue(queued)

    def lose(self, rows: I32, reason: Reason, now: int) -> None:
        """Demote or drop rows that can't meet their SLO any more, as their class says."""
        fate = self.table.on_late[rows]
        demoted = rows[(fate == OnLate.DEMOTE) & ~self.table.demoted[rows]]
        if demoted.size:
            self.demote(demoted, reason, now)
        self.end_all(rows[fate == OnLate.EXPIRE], Outcome.EXPIRED, reason, now)

    def end(self, row: int, outcome: Outcome, reason: Reason, now: int) -> None:
        """End one request; see `end_all`."""
        self.end_all(np.array([row], np.int32), outcome, reason, now)

    def end_all(
        self, rows: I32, outcome: Outcome, reason: Reason, now: int, finishes: Sequence[Finish] = ()
    ) -> None:
        """The one way out: frees everything the rows have and recycles them.

        The KV of completed rows that hand it over stays, with the row, until `handed_over`.

        Args:
            rows: int32[n], distinct.
            outcome, reason: of all of them.
            now: the time, ns.
            finishes: what the engine said about the last token of each; NONE where it is not given.
        """
        if rows.size == 0:
            return
        self.enqueue_arrivals()
        t, event = self.table, int(EVENT_OF[outcome])
        ended: Records = self.scratch.ended.take(rows.size)
        stopping = write_endings(
            t.records, rows, outcome == Outcome.COMPLETED, now, self.slot, event, int(reason),
            ended, self.trace.records.room(rows.size),
        )  # fmt: skip
        self.trace.records.wrote(rows.size)
        given = finishes or [Finish.NONE] * rows.size
        for finish, fields in zip(given, ended.tolist(), strict=True):
            row, seq, tenant, cls, met, demoted, arrival, admitted, first, *counts = fields[:_OF_ENDING]
            self.endings.append(
                Ending(
                    self.names[row], row, seq, tenant, cls, outcome, finish, reason, met, demoted,
                    arrival, admitted, first, now, *counts,
                )
            )  # fmt: skip
        leaving = rows
        if stopping == rows.size:
            self.stop(rows, State.FREE)
        else:
            leaving = self._leave_otherwise(rows, ended)
        self._leave_forks(rows, now)
        self.fairness.closed(ended["tenant"])
        self._recycle(leaving)

    def _leave_otherwise(self, rows: I32, ended: Records) -> I32:
        """End rows of which not all run, or some hand over their KV. Returns those that hold nothing now."""
        t, going, state = self.table, ended["going"], ended["state"]
        self.waiting.take(rows[state == State.WAITING])
        brought = rows[ended["brought"]]
        self.kv.release(brought, np.full(brought.size, -1, np.int64))
        if going.any():
            t.stop_running(rows[going], State.GOING)
            t.inflight_slot[rows[going]] = ended["inflight_slot"][going]
        running = rows[(state == State.RUNNING) & ~going]
        if running.size:
            self.stop(running, State.FREE)
        leaving: I32 = rows[~going]
        t.state[leaving] = State.FREE
        return leaving

    def _recycle(self, rows: I32) -> None:
        """Rows that hold nothing any more get ready for others."""
        for row in rows.tolist():
            self.kv.forget(row)
            del self.ids[self.names.pop(row)]
        self.table.recycle(rows)

    def _leave_forks(self, rows: I32, now: int) -> None:
        """Rows that end hold no sibling back any more, and are held back by none."""
        if not self._held:
            return
        for row, parent in zip(rows.tolist(), self.table.fork_of[rows].tolist(), strict=True):
            if parent in self._held:
                self._held[parent].remove(row)
            self._release_held(row, now)

    def prompts_done(self, now: int) -> None:
        """Let forks go whose sibling has computed their prompt."""
        t = self.table
        for parent, children in self._held.items():
            if t.confirmed[parent] >= t.prompt[parent]:
                self._let_go(children, now)

    def _release_held(self, parent: int, now: int) -> None:
        """Forks of a row that can no longer be shared take the ordinary way."""
        children = self._held.pop(parent, [])
        self.table.fork_of[children] = NO_ROW
        self._let_go(children, now)

    def _let_go(self, children: list[int], now: int) -> None:
        """Queue those forks that were held back."""
        held = np.array([c for c in children if self.table.state[c] == State.HELD], np.int32)
        if held.size:
            self.trace.note(self.slot, now, self.table.seq[held], Event.REKEYED, Reason.NONE)
            self.enqueue(held)


_OF_ENDING = ENDED.names.index("service_ns") + 1 if ENDED.names else 0
"""How many fields of `ENDED` an `Ending` has."""


@kernel
def find_known(records: Records, rows: I32, out: I32) -> None:
    """Tokens of each row that a cache may have: all that are known but one, which must be computed."""
    for i in range(rows.size):
        out[i] = records[rows[i]]["prompt"] + records[rows[i]]["outputs"] - 1


@kernel
def begin_waiting(
    records: Records, rows: I32, cached: I32, gives_up: bool,
    slot_ns: float, token_ns: float, decode_ns: float, left: I32, latest: F64,
) -> None:  # fmt: skip
    """Rows wait from now on. Fills `left`, the tokens to compute beyond those `cached`, and latest starts."""
    for i in range(rows.size):
        row = records[rows[i]]
        row["state"] = _WAITING
        left[i] = row["prompt"] + row["outputs"] - cached[i, 0]
        latest[i] = latest_start_ns(row, left[i], slot_ns, token_ns, decode_ns) if gives_up else np.inf


@kernel
def latest_starts(
    records: Records, rows: I32, uncached: I32, slot_ns: float, token_ns: float, decode_ns: float, out: F64
) -> None:
    """See `Lifecycle.latest_start`."""
    for i in range(rows.size):
        out[i] = latest_start_ns(records[rows[i]], uncached[i], slot_ns, token_ns, decode_ns)


@kernel
def start_rows(records: Records, rows: I32, starts: I32, first_seq: int, now: int) -> tuple[int, int]:
    """Bring admitted rows up to date; `starts`: int32[n], positions found in the cache or shared.

    Returns the sums of their prompt tokens and of those that were found, without rows that brought theirs.
    """
    prompts, found = 0, 0
    for i in range(rows.size):
        row = records[rows[i]]
        row["computed"] = starts[i]
        row["confirmed"] = starts[i]
        row["passes"] = 0
        row["admitted_seq"] = first_seq + i
        brought = row["brought"]
        row["brought"] = False
        if row["admitted_ns"] < 0:
            row["admitted_ns"] = now
            row["cached"] = 0 if brought else starts[i]
        if brought:
            continue
        prompts += row["prompt"]
        found += min(starts[i], row["prompt"])
    return prompts, found
