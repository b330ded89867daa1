"""What one slot decides (B, P, Pi, V, T) and what an engine answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


def empty_i32() -> I32:
    """An empty int32 array."""
    return np.empty(0, np.int32)


_NOTHING = empty_i32()
_NO_HOW: I8 = np.empty(0, np.int8)
_NO_PAIRS: I32 = np.empty((0, 2), np.int32)
_NO_MOVES: I32 = np.empty((0, 3), np.int32)


class How(IntEnum):
    """How a preempted request's KV is dealt with."""

    RECOMPUTE = 0
    SWAP = 1
    MIGRATE = 2


class Way(IntEnum):
    """Where a KV block is moved."""

    OUT = 0  # from the pool to host memory
    IN = 1  # from host memory to the pool


@dataclass(slots=True)
class Decision:
    """One slot on one replica. Arrays are parallel; their order is the order of execution (Pi).

    Attributes:
        slot: increasing by one per decision.
        rows: int32[n], which requests run (B).
        tokens: int32[n], chunk sizes (P), >= 1.
        starts: int32[n], position of each chunk's first token.
        samples: bool[n], whether the chunk ends in sampling one new token.
        epochs: int32[n], the row's epoch; a result with an older epoch is stale.
        preempted: int32[m], rows stopped by this decision (V), how in `how`.
        how: int8[m], values of `How`.
        swaps: int32[k, 3], KV blocks to move first of all, in this order: `Way`, source, destination.
        copies: int32[k, 2], KV block copies (source, destination) to do before the step (copy-on-write).
        moves: int32[k, 3], KV blocks to move over a link (block, from, to) (T).
        loads: int32[k, 2], LoRA adapters (index) to load before the step, and the slot that each goes into.
        predicted_ns: estimate of the step, loads included.
        bound_ns: how long the tightest TBT lets this slot last; NEVER_NS when nothing binds.
    """

    slot: int
    rows: I32
    tokens: I32
    starts: I32
    samples: Bool
    epochs: I32
    preempted: I32 = field(default_factory=lambda: _NOTHING)
    how: npt.NDArray[np.int8] = field(default_factory=lambda: _NO_HOW)
    swaps: I32 = field(default_factory=lambda: _NO_MOVES)
    copies: I32 = field(default_factory=lambda: _NO_PAIRS)
    moves: I32 = field(default_factory=lambda: _NO_MOVES)
    loads: I32 = field(default_factory=lambda: _NO_PAIRS)
    predicted_ns: int = 0
    bound_ns: int = 0

    @property
    def empty(self) -> bool:
        """True when the slot runs nothing."""
        return self.rows.size == 0


@dataclass(slots=True)
class StepResult:
    """What a step did. Rows are those of the decision, in its order.

    Attributes:
        slot: the decision's slot.
        rows: int32[n].
        epochs: int32[n], copied from the decision.
        new_tokens: int32[n], how many output tokens each row produced (0 for an unfinished prefill).
        token_ids: int32[sum(new_tokens)], in row order.
        finish: int8[n], values of `Finish`.
        failed: bool[n], rows whose chunk failed; their KV of this step is invalid.
        retryable: bool[n], failed rows that may be tried again.
        started_ns, ended_ns: engine clock around the step; `ended_ns` is the emission time.
        swap_ns: how much of that time moves of KV to and from host memory took.
        message: error text when any row failed.
        payloads: per row, what the engine wants its client to get beside the token ids (text,
            logprobs); None for rows without, or when the engine has none at all.
    """

    slot: int
    rows: I32
    epochs: I32
    new_tokens: I32
    token_ids: I32
    finish: npt.NDArray[np.int8]
    failed: Bool
    retryable: Bool
    started_ns: int
    ended_ns: int
    message: str = ""
    swap_ns: int = 0
    payloads: list[Any] | None = None
