"""`KVSpace` over vLLM's own block manager: it asks, and keeps no books of its own.

Blocks are taken by vLLM itself, when it carries out what was decided, so `reserve` and `attach` take
nothing; `release` of a row that runs is vLLM's preemption. Models with several kinds of KV cache share
one pool: there a block here stands for one of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kaiseki.core.decision import I32, I64, Bool
from kaiseki.engines.vllm import adapter

_LOOKED_AT = 64
"""Rows whose blocks `reclaimable` counts; further ones are taken to free nothing more."""
_NO_COPIES: I32 = np.empty((0, 2), np.int32)
_NO_MOVES: I32 = np.empty((0, 3), np.int32)


class VllmBlocks:
    """See the module. Implements `KVSpace`.

    Args:
        scheduler: the vLLM scheduler whose manager is asked.
        stop: preempts a running request.
    """

    def __init__(self, scheduler: Any, stop: Callable[[Any], None]) -> None:
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._groups = adapter.groups_of(scheduler)
        self._kinds = max(1, len(self._groups))
        self._stop = stop
        self._block_tokens = int(scheduler.block_size)
        self._total = (int(self._pool.num_gpu_blocks) - 1) // self._kinds  # one is vLLM's null block
        self.requests: dict[int, Any] = {}
        """By row."""
        self.arriving: Any = None
        """The request that is being submitted, whose row the core tells by `register`."""

    @property
    def block_tokens(self) -> int:
        """See `KVSpace`."""
        return self._block_tokens

    @property
    def total_blocks(self) -> int:
        """See `KVSpace`."""
        return self._total

    def free_blocks(self) -> int:
        """See `KVSpace`."""
        return int(self._pool.get_num_free_blocks()) // self._kinds

    def live_blocks(self) -> int:
        """See `KVSpace`; vLLM keeps nothing in limbo without a connector, and tells of none with one."""
        return self._total - self.free_blocks()

    def register(self, row: int, block_hashes: tuple[bytes, ...]) -> None:
        """See `KVSpace`; vLLM has the digests already."""
        self.requests[row] = self.arriving

    def forget(self, row: int) -> None:
        """See `KVSpace`."""
        self.requests.pop(row, None)

    def cached_tokens(self, rows: I32, limits: I32) -> I32:
        """See `KVSpace`."""
        out = np.zeros((rows.size, 2), np.int32)
        for i, (row, limit) in enumerate(zip(rows.tolist(), limits.tolist(), strict=True)):
            request = self.requests[row]
            if request.num_computed_tokens:  # a session, or KV that a connector has brought
                out[i, 0] = min(request.num_computed_tokens, limit)
                continue
            blocks, tokens, _ = self._manager.get_computed_blocks(request)
            if tokens:
                idle = sum(block.ref_cnt == 0 for group in blocks.blocks for block in group)
                out[i] = min(tokens, limit), -(-idle // self._kinds)
        return out

    def attach(self, rows: I32, limits: I32) -> I32:
        """See `KVSpace`; vLLM attaches what it finds when it admits a request."""
        return limits

    def pin(self, rows: I32, limits: I32) -> None:
        """See `KVSpace`; vLLM evicts in an order of its own."""

    def fork(self, parent: int, child: int, tokens: int) -> None:
        """See `KVSpace`.

        Raises:
            NotImplementedError: always; in vLLM siblings share by the prefix cache.
        """
        raise NotImplementedError("vLLM has no forks")

    def growth_need(self, rows: I32, starts: I32, ends: I32) -> I32:
        """See `KVSpace`."""
        held = self._held(rows)
        need: I32 = np.maximum(-(-ends // self._block_tokens) - held, 0).astype(np.int32)
        return need

    def reserve(self, rows: I32, starts: I32, ends: I32) -> I32:
        """See `KVSpace`; vLLM has taken the blocks of what it scheduled."""
        return _NO_COPIES

    def reclaimable(self, rows: I32) -> I64:
        """See `KVSpace`; what rows behind the first 64 would free is not counted."""
        out = np.zeros(rows.size, np.int64)
        users: dict[int, int] = {}
        freed = 0
        for i, row in enumerate(rows[:_LOOKED_AT].tolist()):
            request_id = self.requests[row].request_id
            for held in self._groups:
                freed += _freed(held.get(request_id, ()), users)
            out[i] = freed // self._kinds
        out[_LOOKED_AT:] = freed // self._kinds
        return out

    def commit(self, rows: I32, valid_tokens: I32) -> None:
        """See `KVSpace`; vLLM makes full blocks shareable itself."""

    def release(self, rows: I32, fences: I64) -> None:
        """See `KVSpace`. A row that runs is preempted; one that ended has given its blocks up already."""
        for row in rows.tolist():
            request = self.requests[row]
            if adapter.is_running(request):
                self._stop(request)

    def swap_out(self, rows: I32, fences: I64) -> Bool:
        """See `KVSpace`.

        Raises:
            NotImplementedError: always; vLLM computes KV of preempted requests again.
        """
        raise NotImplementedError("vLLM has no swap")

    def take_moves(self) -> I32:
        """See `KVSpace`; there are none."""
        return _NO_MOVES

    def retire(self, slot: int) -> None:
        """See `KVSpace`."""

    def _held(self, rows: I32) -> I32:
        """int32[n], blocks that rows have."""
        ids = [self.requests[row].request_id for row in rows.tolist()]
        held = (max((len(group.get(i, ())) for group in self._groups), default=0) for i in ids)
        return np.fromiter(held, np.int32, rows.size)


class Foreseen(VllmBlocks):
    """The same blocks for a decision that is only foreseen: what it stops goes on, and counts as free."""

    _given: int

    @classmethod
    def of(cls, blocks: VllmBlocks) -> Foreseen:
        """One over the same manager."""
        twin = cls.__new__(cls)
        twin.__dict__.update(blocks.__dict__)
        twin.requests = dict(blocks.requests)
        twin._given = 0
        return twin

    def free_blocks(self) -> int:
        """See `KVSpace`."""
        return super().free_blocks() + self._given

    def release(self, rows: I32, fences: I64) -> None:
        """See `KVSpace`."""
        self._given += int(self.reclaimable(rows)[-1]) if rows.size else 0


def _freed(blocks: Any, users: dict[int, int]) -> int:
    """Blocks of one more request that nobody else uses, counting out those in `users`, which is added to.

    Requests share what they begin with: from the first block on that only one uses, none is shared.
    """
    for place, block in enumerate(blocks):
        if block.ref_cnt == 1 and not block.is_null:
            return len(blocks) - place + _unshared(blocks[:place], users)
    return _unshared(blocks, users)


def _unshared(blocks: Any, users: dict[int, int]) -> int:
    freed = 0
    for block in blocks:
        if block.is_null:  # in the place of one that a sliding window has left
            continue
        users[id(block)] = users.get(id(block), 0) + 1
        freed += users[id(block)] == block.ref_cnt
    return freed
