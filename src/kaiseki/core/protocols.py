"""The three seams between the core and the world: `Engine`, `CostModel`, `KVSpace`.

What differs between the embedded engine, vLLM, the simulator and a cluster is behind these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kaiseki.core.decision import F64, I32, I64, Bool, Decision, StepResult

FEATURES = (
    "slot",
    "decode_rows",
    "prefill_chunks",
    "prefill_tokens",
    "decode_context",
    "prefill_pairs",
    "prefill_context",
)
"""What a cost model sees of a chunk set, in this order.

slot: 1 for any non-empty set. decode_rows: rows that compute one token after their prompt.
prefill_chunks, prefill_tokens: number and total length of the other chunks. decode_context: sum of
the decodes' context lengths, tokens. prefill_pairs: sum over prefill chunks of n*(start + (n+1)/2),
the query-key pairs of causal attention. prefill_context: sum of their starts, tokens of KV read.
"""
N_FEATURES = len(FEATURES)
F_SLOT, F_DECODES, F_CHUNKS, F_TOKENS, F_CONTEXT, F_PAIRS, F_PREFIX = range(N_FEATURES)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do.

    Attributes:
        depth: how many decisions may be in flight beyond the one being executed: 0, 1 (asynchronous)
            or stages - 1 (pipeline parallel).
        placeholders: whether a row may be scheduled again before its last token is known
            (asynchronous engines); if not, decisions in flight have disjoint (row, epoch) pairs.
        pause_decode: whether a running decode may get nothing in a slot.
        max_context_tokens: longest prompt + output.
        max_step_tokens: most tokens in one step.
        adapter_slots: how many LoRA adapters can be loaded at a time; 0 where there are none.
        adapter_load_ns: how long loading one takes, before the step that needs it.
        swap_block_ns: how long moving a KV block to or from host memory takes, at a guess; 0 where it can't.
        migrate: whether KV can be moved to another replica.
    """

    depth: int = 0
    placeholders: bool = True
    pause_decode: bool = True
    max_context_tokens: int = 1 << 20
    max_step_tokens: int = 8192
    adapter_slots: int = 0
    adapter_load_ns: int = 0
    swap_block_ns: int = 0
    migrate: bool = False


class Engine(Protocol):
    """Executes decisions. At most `capabilities.depth + 1` may be outstanding."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; constant."""
        ...

    def open(self, row: int, work: Any) -> None:
        """A request now has this row; `work` is what the engine needs to run it (its own type)."""
        ...

    def close(self, row: int) -> None:
        """The row's request has ended. Results for it that are still in flight are never used."""
        ...

    def execute(self, decision: Decision) -> None:
        """Start a decision, its loads of adapters first.

        Everything mutable (block tables) is read before this returns.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest outstanding decision and return what it did.

        An error inside the step is reported in the result (`failed`), never raised.
        """
        ...


class CostModel(Protocol):
    """How long a chunk set takes, as data that compiled code can evaluate.

    A step is predicted to take `sum_k max_j planes[k, j] . features` nanoseconds: a sum of maxima of
    linear forms, which covers plain linear models (one plane) and rooflines (compute against memory).
    Every plane is non-decreasing in every feature.
    """

    def planes(self) -> F64:
        """float64[K, J, N_FEATURES], nanoseconds per unit of feature."""
        ...

    def headroom(self) -> float:
        """Factor >= 1 by which a prediction is multiplied to be safe against its own error."""
        ...

    def observe(self, features: F64, measured_ns: int) -> None:
        """Learn from one measured step. `features` is float64[N_FEATURES]."""
        ...


class KVSpace(Protocol):
    """Where KV lives. The only ledger: the core asks and never counts blocks itself.

    Rows are request-table rows. Calls take and return arrays, once per slot.
    """

    @property
    def block_tokens(self) -> int:
        """Tokens per block (page)."""
        ...

    @property
    def total_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    def free_blocks(self) -> int:
        """Blocks that can be reserved now: unowned ones and cached ones nobody uses."""
        ...

    def live_blocks(self) -> int:
        """Blocks that some request holds (shared ones once); free + live + in limbo = total."""
        ...

    def register(self, row: int, block_hashes: tuple[bytes, ...]) -> None:
        """Learn of a new request and the digests of its full prompt blocks."""
        ...

    def forget(self, row: int) -> None:
        """The row is recycled. It must hold no blocks."""
        ...

    def cached_tokens(self, rows: I32, limits: I32) -> I32:
        """int32[n, 2]: tokens of the longest reusable prefix (at most `limits`, a whole number of blocks),
        and how many of its blocks nobody holds now, so that attaching it takes them from `free_blocks`.
        Of rows that hold blocks, and do not run yet: the committed positions below the limit, and 0.
        """
        ...

    def attach(self, rows: I32, limits: I32) -> I32:
        """Share the cached prefix with rows that hold no blocks. Returns tokens attached, int32[n]."""
        ...

    def pin(self, rows: I32, limits: I32) -> None:
        """Have the cached prefixes of these waiting rows evicted last, in place of those named before."""
        ...

    def fork(self, parent: int, child: int, tokens: int) -> None:
        """Give `child`, which holds no blocks, the parent's blocks that cover `tokens` positions."""
        ...

    def growth_need(self, rows: I32, starts: I32, ends: I32) -> I32:
        """int32[n]: blocks to take so that positions [start, end) of each row can be written.

        Includes copies of blocks that are shared and would be written to.
        """
        ...

    def reserve(self, rows: I32, starts: I32, ends: I32) -> I32:
        """Take what `growth_need` said. Returns int32[k, 2] block copies (source, destination).

        Raises:
            OutOfBlocks: nothing was taken; the caller should have asked first.
        """
        ...

    def reclaimable(self, rows: I32) -> I64:
        """int64[n]: blocks that stopping rows[:i+1] together would free, for every i."""
        ...

    def commit(self, rows: I32, valid_tokens: I32) -> None:
        """Positions below `valid_tokens` of each row now hold computed KV; full ones become shareable."""
        ...

    def release(self, rows: I32, fences: I64) -> None:
        """Give up the rows' blocks; with a fence >= 0 they stay in limbo until that slot retires."""
        ...

    def swap_out(self, rows: I32, fences: I64) -> Bool:
        """As `release`, but keep what the rows alone hold in host memory. bool[n]: of which rows it is kept.

        Until `forget` or `attach`, such a row counts as one whose KV is cached, and what has to be brought
        back as blocks that attaching takes.
        """
        ...

    def take_moves(self) -> I32:
        """int32[k, 3]: `Decision.swaps` that follow from `swap_out` and `attach` since the last call."""
        ...

    def retire(self, slot: int) -> None:
        """The result of `slot` was applied: what was fenced by it, or by earlier slots, is free."""
        ...


class OutOfBlocks(RuntimeError):
    """`reserve` was asked for more blocks than are free."""
