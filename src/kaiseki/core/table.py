"""The request table: one row per open request, one array per property, rows recycled."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.jit import kernel
from kaiseki.core.requests import NEVER_NS

NO_ROW = -1

Records = npt.NDArray[np.void]
"""Structured arrays."""
Record = Any
"""One element of a structured array, in compiled code."""


class State(IntEnum):
    """Where a row is in its life."""

    FREE = 0
    HELD = 1  # a fork that waits for its sibling to compute their prompt
    WAITING = 2
    RUNNING = 3
    BACKING_OFF = 4  # an engine error hit it, and it is in no queue until it may be tried again
    COMING = 5  # its blocks are taken, and its KV is on the way from another replica
    GOING = 6  # it has ended here, and its KV is on the way to another replica


_RUNNING = int(State.RUNNING)

ROW = np.dtype(
    [  # what every slot looks at comes first, so that it shares cache lines
        ("state", np.int32),
        ("epoch", np.int32),
        ("prompt", np.int32),
        ("outputs", np.int32),
        ("pending", np.int32),
        ("computed", np.int32),
        ("confirmed", np.int32),
        ("max_tokens", np.int32),
        ("min_tokens", np.int32),
        ("inflight_slot", np.int64),
        ("tbt_ns", np.int64),
        ("last_token_ns", np.int64),
        ("arrival_ns", np.int64),
        ("ttft_ns", np.int64),
        ("deadline_ns", np.int64),
        ("admitted_seq", np.int64),
        ("late_gaps", np.int32),
        ("tenant", np.int32),
        ("group", np.int32),
        ("last_reason", np.int32),
        ("demoted", np.bool_),
        ("shared_tail", np.bool_),
        ("hands_over", np.bool_),
        ("brought", np.bool_),
        ("seq", np.int64),
        ("cls", np.int32),
        ("tier", np.int32),
        ("priority", np.int32),
        ("weight", np.float64),
        ("on_late", np.int32),
        ("adapter", np.int32),
        ("cached", np.int32),
        ("fork_of", np.int32),
        ("passes", np.int32),
        ("preemptions", np.int32),
        ("preempted_slot", np.int64),
        ("recomputed", np.int64),
        ("admitted_ns", np.int64),
        ("first_token_ns", np.int64),
        ("service_ns", np.float64),
    ],
    align=True,
)
"""One open request. The fields are explained where `RequestTable` names them as columns."""

_COLUMNS = frozenset(ROW.names or ())
_EMPTY = np.zeros((), ROW)
for _name, _value in (
    ("seq", -1),
    ("preempted_slot", -(2**40)),
    ("weight", 1.0),
    ("ttft_ns", NEVER_NS),
    ("tbt_ns", NEVER_NS),
    ("deadline_ns", NEVER_NS),
    ("state", State.FREE),
    ("inflight_slot", -1),
    ("group", -1),
    ("fork_of", NO_ROW),
    ("adapter", -1),
    ("admitted_seq", -1),
    ("admitted_ns", -1),
    ("first_token_ns", -1),
    ("last_token_ns", -1),
):
    _EMPTY[_name] = _value


class RequestTable:
    """One record per request, whose fields are also columns: `table.prompt[rows]`.

    Compiled code takes `records` whole, as one argument, and finds what it needs of a request side by
    side in memory; a row is made new by one assignment.

    The `running` rows are also kept as a compact array. Token counts obey
    `confirmed <= computed <= known + pending` and `known = prompt + outputs`.
    """

    # who, set at submit
    seq: I64  # arrival sequence, unique for ever
    tenant: I32
    group: I32  # tenant * LANES + lane in which it waits or waited last, -1 before that
    cls: I32
    tier: I32  # class tier + request priority; lower is sooner
    priority: I32  # of the request within its class; lower is sooner
    weight: F64
    on_late: I32
    adapter: I32  # index of its LoRA adapter, -1 for the base model
    arrival_ns: I64
    ttft_ns: I64  # relative targets; NEVER_NS where there is none
    tbt_ns: I64
    deadline_ns: I64
    # how much, in tokens
    prompt: I32
    max_tokens: I32
    min_tokens: I32
    outputs: I32  # known outputs
    pending: I32  # outputs being sampled by decisions in flight
    computed: I32  # positions whose KV exists or is being computed in flight
    confirmed: I32  # positions whose KV is known to exist
    cached: I32  # prompt tokens that came from the prefix cache at first admission
    # what happens to it
    state: I32
    epoch: I32  # rises when work in flight becomes void
    inflight_slot: I64  # newest slot in flight that has this row, -1 for none
    demoted: Bool
    shared_tail: Bool  # its last block may be shared, so the next write may need one block more
    hands_over: Bool  # its KV stays when it has ended, until another replica has it
    brought: Bool  # it holds the KV that another replica sent or is sending, and has not run here yet
    fork_of: I32  # row of the sibling to share a prompt with, NO_ROW otherwise
    passes: I32  # times looked at and passed over while later ones went
    preemptions: I32
    preempted_slot: I64
    admitted_seq: I64  # order of (last) admission among running rows
    recomputed: I64  # tokens computed again because of preemption
    # times
    admitted_ns: I64  # first admission
    first_token_ns: I64
    last_token_ns: I64
    late_gaps: I32
    service_ns: F64  # card time charged for it
    last_reason: I32

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = 0
        self.records: Records = np.empty(0, ROW)
        self.running: I32 = np.empty(0, np.int32)
        self.running_count = 0
        self._running_pos: I32 = np.empty(0, np.int32)
        self._free: list[int] = []
        self.open_rows = 0
        self._grow(capacity)

    def _grow(self, capacity: int) -> None:
        old, self.capacity = self.capacity, capacity
        records = np.full(capacity, _EMPTY)
        records[:old] = self.records
        self.records = records
        self._name_columns()
        self.running = np.concatenate([self.running, np.zeros(capacity - old, np.int32)])
        self._running_pos = np.concatenate([self._running_pos, np.full(capacity - old, -1, np.int32)])
        self._free.extend(range(capacity - 1, old - 1, -1))

    def _name_columns(self) -> None:
        for name in ROW.names or ():
            setattr(self, name, self.records[name])

    def __getstate__(self) -> dict[str, Any]:
        """Without the columns, or a copy would have them apart from its records."""
        return {name: value for name, value in self.__dict__.items() if name not in _COLUMNS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._name_columns()

    def take(self) -> int:
        """A fresh row with default values; doubles the table when it is full."""
        if not self._free:
            self._grow(2 * self.capacity)
        self.open_rows += 1
        return self._free.pop()

    def recycle(self, rows: I32) -> None:
        """Give rows back. None may be running."""
        blank_rows(self.records, rows, _EMPTY.reshape(1))
        self._free.extend(rows.tolist())
        self.open_rows -= rows.size

    def copy_of(self, rows: I32) -> Records:
        """ROW[n]: whole records, copied; NumPy takes ten times as long to index records by an array."""
        out: Records = np.empty(rows.size, ROW)
        copy_rows(self.records, rows, out)
        return out

    def running_rows(self) -> I32:
        """int32[running], a view in no particular order."""
        return self.running[: self.running_count]

    def start_running(self, rows: I32) -> None:
        """Mark rows, which are not running, as running."""
        run_rows(self.records, self.running, self._running_pos, self.running_count, rows)
        self.running_count += rows.size

    def stop_running(self, rows: I32, state: State) -> None:
        """Take rows out of the running set; what is in flight for them becomes void."""
        stop_rows(self.records, self.running, self._running_pos, self.running_count, rows, int(state))
        self.running_count -= rows.size


@kernel
def blank_rows(records: Records, rows: I32, empty: Records) -> None:
    """Make rows as new (`empty`: ROW[1]), but for their epochs."""
    for i in range(rows.size):
        # The epoch goes on, so that a late result never meets the row's next owner.
        epoch = records[rows[i]]["epoch"] + 1
        records[rows[i]] = empty[0]
        records[rows[i]]["epoch"] = epoch


@kernel
def copy_rows(records: Records, rows: I32, out: Records) -> None:
    """Fill `out` with the records of rows."""
    for i in range(rows.size):
        out[i] = records[rows[i]]


@kernel
def run_rows(records: Records, running: I32, places: I32, count: int, rows: I32) -> None:
    """Put rows behind the first `count` of `running`."""
    for i in range(rows.size):
        records[rows[i]]["state"] = _RUNNING
        running[count + i] = rows[i]
        places[rows[i]] = count + i


@kernel
def stop_rows(records: Records, running: I32, places: I32, count: int, rows: I32, state: int) -> None:
    """Take rows out of the first `count` of `running`, filling the holes from its end."""
    for i in range(rows.size):
        r = rows[i]
        hole = places[r]
        count -= 1
        last = running[count]
        running[hole] = last
        places[last] = hole
        places[r] = -1
        row = records[r]
        row["state"] = state
        row["epoch"] += 1
        row["pending"] = 0
        row["computed"] = 0
        row["confirmed"] = 0
        row["inflight_slot"] = -1
        row["shared_tail"] = False


_NOBODY: F64 = np.empty(0)


class View:
    """Read-only window on some rows of the table, as policies see it: `view.prompt` is `prompt[rows]`.

    Args:
        table: the request table.
        rows: int32[n].
        uncached: int32[n], tokens still to be computed before the next output token, best cache.
        slot_ns, token_ns: fixed and per-token cost of a lone prefill, ns.
        pace_slot_ns, pace_token_ns: the same under the load of recent slots: per step, per prefill token.
        tokens: float64[tenants], weighted tokens charged to each tenant, per unit of its weight.
        weights: float64[tenants].
    """

    def __init__(
        self,
        table: RequestTable,
        rows: I32,
        uncached: I32,
        slot_ns: float,
        token_ns: float,
        pace_slot_ns: float,
        pace_token_ns: float,
        tokens: F64 = _NOBODY,
        weights: F64 = _NOBODY,
    ) -> None:
        self._table = table
        self.rows = rows
        self.uncached = uncached
        self.load_ns: F64 = _NOBODY
        """float64[n], what loading its adapter would take, ns; empty where nothing says so."""
        self._lone = slot_ns, token_ns
        self._pace = pace_slot_ns, pace_token_ns
        self._tokens = tokens
        self._weights = weights
        self._taken: Records | None = None

    @property
    def lone_ns(self) -> F64:
        """float64[n], predicted time to compute `uncached` alone on the card."""
        slot_ns, token_ns = self._lone
        lone: F64 = slot_ns + token_ns * self.uncached.astype(np.float64)
        return lone

    @property
    def paced_ns(self) -> F64:
        """float64[n], predicted time to its last certain token at the pace of recent slots."""
        slot_ns, token_ns = self._pace
        rest = np.maximum(self.min_tokens - self.outputs - 1, 0)
        paced: F64 = token_ns * self.uncached.astype(np.float64) + rest * slot_ns
        return paced

    @property
    def tenant_tokens(self) -> F64:
        """float64[n], weighted tokens (see `Policy.input_weight`) of its tenant, per unit of its weight."""
        tokens: F64 = self._tokens[self.tenant]
        return tokens

    @property
    def tenant_weight(self) -> F64:
        """float64[n], share of its tenant."""
        weights: F64 = self._weights[self.tenant]
        return weights

    @property
    def pace(self) -> tuple[float, float]:
        """Ns per step, and per prefill token, under the load of recent slots."""
        return self._pace

    @property
    def records(self) -> Records:
        """ROW[n]: whole records, for compiled functions."""
        if self._taken is None:  # at once: a few whole rows cost little more than one of their columns
            self._taken = self._table.copy_of(self.rows)
        return self._taken

    @property
    def running(self) -> int:
        """How many requests run, in this view or not."""
        return self._table.running_count

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        if name not in _COLUMNS:
            raise AttributeError(f"a request has no {name!r}")
        return self.records[name]
