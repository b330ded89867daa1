"""The request table: one row per open request, one array per property, rows recycled."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.requests import NEVER_NS

NO_ROW = -1


class State(IntEnum):
    """Where a row is in its life."""

    FREE = 0
    HELD = 1  # a fork that waits for its sibling to compute their prompt
    WAITING = 2
    RUNNING = 3


class RequestTable:
    """A struct of arrays. Columns are read and written as whole arrays or through rows; see the comments.

    The `running` rows are also kept as a compact array. Token counts obey
    `confirmed <= computed <= known + pending` and `known = prompt + outputs`.
    """

    # who, set at submit
    seq: I64  # arrival sequence, unique for ever
    tenant: I32
    cls: I32
    tier: I32  # class tier + request priority; lower is sooner
    priority: I32  # of the request within its class; lower is sooner
    weight: F64
    on_late: I32
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

    _DEFAULTS: tuple[tuple[str, type[np.generic], float], ...] = (
        ("seq", np.int64, -1),
        ("tenant", np.int32, 0),
        ("cls", np.int32, 0),
        ("tier", np.int32, 0),
        ("priority", np.int32, 0),
        ("weight", np.float64, 1.0),
        ("on_late", np.int32, 0),
        ("arrival_ns", np.int64, 0),
        ("ttft_ns", np.int64, NEVER_NS),
        ("tbt_ns", np.int64, NEVER_NS),
        ("deadline_ns", np.int64, NEVER_NS),
        ("prompt", np.int32, 0),
        ("max_tokens", np.int32, 0),
        ("min_tokens", np.int32, 0),
        ("outputs", np.int32, 0),
        ("pending", np.int32, 0),
        ("computed", np.int32, 0),
        ("confirmed", np.int32, 0),
        ("cached", np.int32, 0),
        ("state", np.int32, State.FREE),
        ("epoch", np.int32, 0),
        ("inflight_slot", np.int64, -1),
        ("demoted", np.bool_, 0),
        ("shared_tail", np.bool_, 0),
        ("fork_of", np.int32, NO_ROW),
        ("passes", np.int32, 0),
        ("preemptions", np.int32, 0),
        ("preempted_slot", np.int64, -(2**40)),
        ("admitted_seq", np.int64, -1),
        ("recomputed", np.int64, 0),
        ("admitted_ns", np.int64, -1),
        ("first_token_ns", np.int64, -1),
        ("last_token_ns", np.int64, -1),
        ("late_gaps", np.int32, 0),
        ("service_ns", np.float64, 0.0),
        ("last_reason", np.int32, 0),
    )
    _KEPT = frozenset({"epoch"})  # survives recycling, so that a late result never meets a row's next owner

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = 0
        self.running: I32 = np.empty(0, np.int32)
        self.running_count = 0
        self._running_pos: I32 = np.empty(0, np.int32)
        self._free: list[int] = []
        self.open_rows = 0
        for name, dtype, _ in self._DEFAULTS:
            setattr(self, name, np.empty(0, dtype))
        self._grow(capacity)

    def _grow(self, capacity: int) -> None:
        old, self.capacity = self.capacity, capacity
        for name, dtype, default in self._DEFAULTS:
            column = np.full(capacity, default, dtype)
            column[:old] = getattr(self, name)
            setattr(self, name, column)
        self.running = np.concatenate([self.running, np.empty(capacity - old, np.int32)])
        self._running_pos = np.concatenate([self._running_pos, np.full(capacity - old, -1, np.int32)])
        self._free.extend(range(capacity - 1, old - 1, -1))

    def take(self) -> int:
        """A fresh row with default values; doubles the table when it is full."""
        if not self._free:
            self._grow(2 * self.capacity)
        self.open_rows += 1
        return self._free.pop()

    def recycle(self, row: int) -> None:
        """Give the row back. It must not be running."""
        for name, _, default in self._DEFAULTS:
            if name not in self._KEPT:
                getattr(self, name)[row] = default
        self.epoch[row] += 1
        self._free.append(row)
        self.open_rows -= 1

    def running_rows(self) -> I32:
        """int32[running], a view in no particular order."""
        return self.running[: self.running_count]

    def start_running(self, rows: I32) -> None:
        """Mark rows, which are not running, as running."""
        self.state[rows] = State.RUNNING
        places = np.arange(self.running_count, self.running_count + rows.size, dtype=np.int32)
        self.running[places] = rows
        self._running_pos[rows] = places
        self.running_count += rows.size

    def stop_running(self, row: int, state: State) -> None:
        """Take a row out of the running set."""
        self.state[row] = state
        hole = self._running_pos[row]
        self.running_count -= 1
        last = self.running[self.running_count]
        self.running[hole] = last
        self._running_pos[last] = hole
        self._running_pos[row] = -1


class View:
    """Read-only window on some rows of the table, as policies see it: `view.prompt` is `prompt[rows]`.

    Attributes:
        rows: int32[n].
        uncached: int32[n], tokens still to be computed before the next output token, best cache.
        lone_ns: float64[n], predicted time to do that alone on the card.
        paced_ns: float64[n], predicted time to its last certain token at the pace of recent slots.
    """

    def __init__(self, table: RequestTable, rows: I32, uncached: I32, lone_ns: F64, paced_ns: F64) -> None:
        self._table = table
        self.rows = rows
        self.uncached = uncached
        self.lone_ns = lone_ns
        self.paced_ns = paced_ns

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        column = getattr(self._table, name)
        return column[self.rows]  # type: ignore[no-any-return]
