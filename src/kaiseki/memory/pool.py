"""The paged block pool: `KVSpace` for engines whose KV lives in fixed-size pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from kaiseki.core.decision import I32, I64, Bool
from kaiseki.core.protocols import OutOfBlocks
from kaiseki.memory import audit, changes, queries
from kaiseki.memory.buddy import BUDDIES
from kaiseki.memory.chains import ChainStore, doubled
from kaiseki.memory.ghosts import STEPS
from kaiseki.memory.hashing import join_digests
from kaiseki.memory.layout import (
    ADAPTS,
    ALLOCATIONS,
    BLOCK_FIELDS,
    CACHED,
    COMMITTED,
    COPIES,
    EVICTIONS,
    FIELDS,
    FREE,
    HIT,
    HOLDS_BLOCKS,
    IDLE,
    IDLE_HEAD,
    LACKS_BLOCKS,
    LANE,
    LANE_FIELDS,
    LARGE,
    LIMBO,
    LIVE,
    MEDIUM,
    N_COUNTERS,
    NEXT,
    NO_BLOCKS_FREE,
    NO_LANE,
    NOT_A_CHAIN,
    OK,
    ORDER,
    PAGE,
    PARENT,
    PINS,
    PLACE,
    QUERIED,
    QUEUED,
    RETIRED,
    ROW,
    ROWS,
    RUNS,
    SINGLES,
    SIZES,
    STACK,
    TARGET,
    UNINDEXED,
    UNKNOWN_ROW,
    WAITING_HEAD,
    WAYS,
    State,
)
from kaiseki.memory.swap import HostSpace

Hasher = Callable[[int, int, int], Sequence[bytes]]
"""`hasher(row, first, last)`: chained digests of the row's pages first..last-1, output included."""

Eviction = Literal["arc", "lru"]
Placement = Literal["pages", "runs"]

_WHAT = {
    UNKNOWN_ROW: (IndexError, "a row was never registered"),
    HOLDS_BLOCKS: (ValueError, "a row that must hold no blocks holds some"),
    LACKS_BLOCKS: (ValueError, "a row does not hold the blocks of the positions asked for"),
    NO_BLOCKS_FREE: (OutOfBlocks, "fewer blocks are free than the rows need"),
    NOT_A_CHAIN: (ValueError, "a row's digests are not a chain: each must stand for all pages before it too"),
}


class PoolStats(NamedTuple):
    """What happened since the pool was made.

    Attributes:
        allocations: blocks taken, copies included.
        evictions: cached blocks whose content was given up for that.
        copies: blocks copied because they were shared or cached and about to be written to.
        queried_tokens, hit_tokens: tokens `attach` was asked for, and those it found.
        cached_blocks: blocks nobody holds that can be found under their digest (now, not a sum).
        limbo_blocks: blocks waiting for a slot to retire (now).
    """

    allocations: int
    evictions: int
    copies: int
    queried_tokens: int
    hit_tokens: int
    cached_blocks: int
    limbo_blocks: int


class BlockPool:
    """KV blocks of one replica: paged, reference-counted, copy-on-write, reusable by prefix.

    Implements `KVSpace`. Rows within one call must be distinct. A row is known from its first
    `register` on; a call with any row beyond those raises IndexError and changes nothing.

    Args:
        total_blocks: blocks in the pool, >= 1. Block numbers are 0 .. total_blocks - 1.
        block_tokens: tokens per block.
        max_rows_hint: rows expected to hold blocks at once; more is fine and costs one growth.
        hasher: gives digests of pages behind the registered ones (generated tokens) when a row is
            released, so that a next turn, or the row itself after a preemption, finds them. It may
            return fewer digests than asked for, or none.
        eviction: which cached blocks are given up first, see `kaiseki.memory.eviction`.
        placement: whether rows get single pages or runs of them, see `kaiseki.memory.buddy`.
        host_blocks: blocks of host memory for KV of stopped rows.
    """

    def __init__(
        self,
        total_blocks: int,
        block_tokens: int = 16,
        max_rows_hint: int = 1024,
        hasher: Hasher | None = None,
        eviction: Eviction = "arc",
        placement: Placement = "pages",
        host_blocks: int = 0,
    ) -> None:
        if total_blocks < 1 or block_tokens < 1 or max_rows_hint < 1:
            raise ValueError("total_blocks, block_tokens and max_rows_hint must be at least 1")
        self._hasher = hasher
        self._host = HostSpace(host_blocks)
        self._chains = ChainStore(max_rows_hint)
        self._scratch: I32 = np.zeros(total_blocks, np.int32)
        self._copies: I32 = np.zeros((total_blocks, 2), np.int32)
        self._counters: I64 = np.zeros(N_COUNTERS, np.int64)
        self._counters[[PAGE, FREE, RETIRED, WAITING_HEAD, IDLE_HEAD]] = (
            block_tokens,
            total_blocks,
            -1,
            -1,
            -1,
        )
        self._counters[[ADAPTS, TARGET, PINS]] = eviction == "arc", STEPS * total_blocks // 2, 1
        self._counters[RUNS] = placement == "runs"
        blocks: I32 = np.zeros((total_blocks, BLOCK_FIELDS), np.int32)
        blocks[:, [PARENT, QUEUED]] = UNINDEXED, -1
        self._state = State(
            blocks=blocks,
            digests=np.zeros((total_blocks, 8), np.int32),
            slots=np.full((doubled(2, 2 * total_blocks), 2), -1, np.int32),
            free=np.full((total_blocks, STACK + SIZES), -1, np.int32),
            queues=np.zeros((2, doubled(2, 2 * total_blocks)), np.int32),
            ghosts=np.zeros((doubled(1, -(-total_blocks // WAYS)), WAYS, FIELDS + 1), np.int32),
            counters=self._counters,
            lanes=np.empty((0, LANE_FIELDS), np.int64),
            tables=np.empty((0, 8), np.int32),
            requests=self._chains.requests,
            chain=self._chains.chain,
        )
        self._lay_out_free()
        self._add_lanes(max_rows_hint)

    @property
    def block_tokens(self) -> int:
        """Tokens per block (page)."""
        return self._counters.item(PAGE)

    @property
    def total_blocks(self) -> int:
        """Blocks in the pool."""
        return int(self._scratch.size)

    def free_blocks(self) -> int:
        """Blocks that can be reserved now: unowned ones and cached ones nobody uses."""
        return self._counters.item(FREE) + self._counters.item(CACHED)

    def live_blocks(self) -> int:
        """Blocks that some row holds, shared ones once."""
        return self._counters.item(LIVE)

    def stats(self) -> PoolStats:
        """Counters since the start, and how many blocks are cached and in limbo."""
        which = [ALLOCATIONS, EVICTIONS, COPIES, QUERIED, HIT, CACHED, LIMBO]
        return PoolStats(*self._counters[which].tolist())

    def unowned_runs(self) -> tuple[int, int, int]:
        """How many runs of 1, 4 and 16 blocks without content there are; single ones only with `pages`."""
        singles, medium, large = self._counters[[SINGLES, MEDIUM, LARGE]].tolist()
        return singles, medium, large

    def register(self, row: int, block_hashes: Sequence[bytes]) -> None:
        """Learn of a new request and the digests of its full prompt blocks.

        Each digest must stand for its page and all pages before it, as those of `chain_hashes` do.

        Raises:
            ValueError: the row is negative or holds blocks, or a digest is not 32 bytes long.
        """
        known = len(self._chains.requests)
        if row < 0 or (row < known and self._chains.requests.item(row, LANE) >= 0):
            raise ValueError(f"row {row} is negative or still holds blocks")
        self._chains.put(row, block_hashes)
        self._follow_chains()

    def forget(self, row: int) -> None:
        """The row is recycled.

        Raises:
            ValueError: it still holds blocks.
        """
        self._check_row(row)
        if self._chains.requests.item(row, LANE) >= 0:
            raise ValueError(f"row {row} still holds blocks")
        self._chains.clear(row)
        self._host.drop(row)

    def cached_tokens(self, rows: I32, limits: I32) -> I32:
        """int32[n, 2]: tokens of the longest reusable prefix within `limits`, and its free blocks.

        The prefix is a whole number of blocks; of a row that holds blocks (whose KV was brought here) it is
        whatever is committed, and costs no free ones. The second column counts those that attaching would
        take from `free_blocks`, for each row as if it alone were attached; with what has to be brought back
        from host memory.
        """
        rows, limits = _i32(rows), _i32(limits)
        out = np.empty((rows.size, 2), np.int32)
        _raise(queries.cached_tokens(*self._state, rows, limits, out))
        for i in self._swapped(rows):
            if self._state.requests[rows[i], LANE] >= 0:
                continue
            found = out[i, 0] // self.block_tokens
            tokens = self._host.restorable(int(rows[i]), int(found), int(limits[i]))
            if tokens > out[i, 0]:
                out[i] = tokens, out[i, 1] + -(-tokens // self.block_tokens) - found
        return out

    def prefix_tokens(self, block_hashes: Sequence[bytes], limit: int) -> int:
        """Tokens of the longest prefix, at most `limit`, that a request with these digests would find now."""
        if not block_hashes:
            return 0
        chain = np.frombuffer(bytearray(join_digests(block_hashes)), np.int32).reshape(-1, 8)
        request = np.array([[-1, 0, len(block_hashes), len(block_hashes)]], np.int32)
        asked = self._state._replace(requests=request, chain=chain)
        out = np.empty((1, 2), np.int32)
        _raise(queries.cached_tokens(*asked, np.zeros(1, np.int32), np.array([limit], np.int32), out))
        return int(out[0, 0])

    def attach(self, rows: I32, limits: I32) -> I32:
        """Share the cached prefix with rows that hold no blocks. Returns tokens attached, int32[n].

        What is kept of a row in host memory is brought back, or dropped.

        Raises:
            ValueError: a row holds blocks, or its digests turn out to be no chain; nothing was changed.
        """
        rows, limits = _i32(rows), _i32(limits)
        out = np.empty(rows.size, np.int32)
        status = changes.attach(*self._state, rows, limits, out)
        if status == NO_LANE:
            self._make_room(rows.size, int(limits.max()))
            status = changes.attach(*self._state, rows, limits, out)
        _raise(status)
        for i in self._swapped(rows):
            out[i] = self._bring_back(int(rows[i]), int(out[i]), int(limits[i]))
        return out

    def pin(self, rows: I32, limits: I32) -> None:
        """Have the cached prefixes of these rows evicted last, and those of an earlier call like others
        again.

        `limits`: as in `attach`. When nothing else is left they are evicted all the same.
        """
        _raise(changes.pin(*self._state, _i32(rows), _i32(limits)))

    def fork(self, parent: int, child: int, tokens: int) -> None:
        """Give `child`, which holds no blocks, the parent's blocks that cover `tokens` positions.

        Positions the parent has not committed yet are not committed for the child either. What was kept of
        the child in host memory is dropped: it was of other tokens.

        Raises:
            ValueError: the child holds blocks or the parent lacks some; nothing was changed.
        """
        self._check_row(parent)
        self._check_row(child)
        status = changes.fork(*self._state, parent, child, tokens)
        if status == NO_LANE:
            self._make_room(1, tokens)
            status = changes.fork(*self._state, parent, child, tokens)
        _raise(status)
        self._host.drop(child)

    def growth_need(self, rows: I32, starts: I32, ends: I32) -> I32:
        """int32[n]: blocks to take so that positions [start, end) of each row can be written.

        Includes copies of blocks that are shared or cached and would be written to. Each row is
        counted as if alone: of two rows that share a block, only one may have to copy it in the end.
        """
        rows, starts, ends = _i32(rows), _i32(starts), _i32(ends)
        out = np.empty(rows.size, np.int32)
        s = self._state
        _raise(
            queries.growth_need(s.blocks, s.counters, s.lanes, s.tables, s.requests, rows, starts, ends, out)
        )
        return out

    def reserve(self, rows: I32, starts: I32, ends: I32) -> I32:
        """Take at most what `growth_need` said. Returns int32[k, 2] block copies (source, destination).

        Positions from `start` on are no longer committed. No source is another copy's destination, so
        copies may be done in any order, before the step writes.

        Raises:
            OutOfBlocks: the sum of `growth_need` is more than `free_blocks`; nothing was taken.
        """
        rows, starts, ends = _i32(rows), _i32(starts), _i32(ends)
        status, copied = changes.reserve(*self._state, rows, starts, ends, self._copies)
        if status == NO_LANE:
            self._make_room(rows.size, int(ends.max()))
            status, copied = changes.reserve(*self._state, rows, starts, ends, self._copies)
        _raise(status)
        return self._copies[:copied].copy()

    def reclaimable(self, rows: I32) -> I64:
        """int64[n]: blocks that stopping rows[:i+1] together would free, for every i."""
        rows = _i32(rows)
        out = np.empty(rows.size, np.int64)
        s = self._state
        _raise(queries.reclaimable(s.blocks, s.lanes, s.tables, s.requests, self._scratch, rows, out))
        return out

    def commit(self, rows: I32, valid_tokens: I32) -> None:
        """Positions below `valid_tokens` of each row now hold computed KV; full ones become shareable.

        Rows that hold no blocks (stopped meanwhile) are passed over. Of rows that compute the same
        page at once the first is shared; the others keep theirs to themselves until they are released.
        """
        _raise(changes.commit(*self._state, _i32(rows), _i32(valid_tokens)))

    def release(self, rows: I32, fences: I64) -> None:
        """Give up the rows' blocks; full committed pages stay findable until their block is needed.

        A block of a row with fence >= 0 stays in limbo until that slot retires. Rows without blocks
        are passed over.
        """
        rows = _i32(rows)
        if self._hasher is not None:
            self._hash_output(rows, self._hasher)
        _raise(changes.release(*self._state, rows, np.ascontiguousarray(fences, np.int64)))

    def swap_out(self, rows: I32, fences: I64) -> Bool:
        """As `release`, but keep in host memory what the rows alone hold. bool[n]: of which it is kept."""
        rows = _i32(rows)
        kept = np.zeros(rows.size, np.bool_)
        for i, row in enumerate(rows.tolist()):
            self._check_row(row)
            lane = int(self._state.requests[row, LANE])
            if lane < 0:
                continue
            tokens = int(self._state.lanes[lane, COMMITTED])
            blocks = self._state.tables[lane, : -(-tokens // self.block_tokens)]
            alone = self._state.blocks[blocks, ROWS] == 1
            first = int(alone.argmax()) if alone.any() else blocks.size
            kept[i] = self._host.put(row, first, tokens, blocks[first:].tolist())
        self.release(rows, fences)
        return kept

    def take_moves(self) -> I32:
        """int32[k, 3]: moves to do, in order, before the next step; see `Decision.swaps`."""
        return self._host.take_moves()

    def retire(self, slot: int) -> None:
        """The result of `slot` was applied: what was fenced by it, or by earlier slots, is free."""
        if slot > self._counters.item(RETIRED):
            if self._counters.item(WAITING_HEAD) < 0:
                self._counters[RETIRED] = slot
            else:
                changes.retire(*self._state, slot)

    def tables(self, rows: I32, ends: I32) -> I32:
        """int32[n, max_blocks]: the blocks of positions [0, end) of each row, padded with 0; a new array.

        Raises:
            ValueError: a row holds fewer blocks.
        """
        s = self._state
        rows, ends = _i32(rows), _i32(ends)
        pages = -(-int(ends.max(initial=0)) // self.block_tokens)
        out = np.empty((rows.size, pages), np.int32)
        _raise(queries.tables_of(s.counters, s.lanes, s.tables, s.requests, rows, ends, out))
        return out

    def check(self) -> None:
        """Audit everything, slowly: for tests and for finding a leak.

        Raises:
            AssertionError: naming what is wrong.
        """
        self._chains.audit()
        audit.check(self._state)
        self._host.audit()
        assert not self._scratch.any(), "reclaimable left counts behind"

    def _swapped(self, rows: I32) -> list[int]:
        """Places of rows of which something is kept in host memory."""
        if not self._host.kept:
            return []
        return [i for i, row in enumerate(rows.tolist()) if row in self._host.kept]

    def _bring_back(self, row: int, attached: int, limit: int) -> int:
        """Take blocks for what is kept of a row behind its prefix; how many tokens it has with that."""
        first = attached // self.block_tokens
        tokens = self._host.restorable(row, first, limit)
        if tokens <= attached:
            self._host.drop(row)
            return attached
        rows, end = np.array([row], np.int32), np.array([tokens], np.int32)
        self.reserve(rows, np.array([attached], np.int32), end)
        blocks = self.tables(rows, end)[0, first:]
        self._host.bring(row, first, blocks.tolist())
        self.commit(rows, end)
        return tokens

    def _hash_output(self, rows: I32, hasher: Hasher) -> None:
        """Lengthen the chains of rows that computed full pages behind their registered digests."""
        for row in rows.tolist():
            self._check_row(row)
            lane, _, count, _ = self._state.requests[row].tolist()
            pages = int(self._state.lanes[lane, COMMITTED]) // self.block_tokens if lane >= 0 else 0
            if pages > count:
                self._chains.append(row, hasher(row, count, pages)[: pages - count])
                self._follow_chains()

    def _follow_chains(self) -> None:
        """Take over arrays of the chain store that grew."""
        if self._state.requests is not self._chains.requests or self._state.chain is not self._chains.chain:
            self._state = self._state._replace(requests=self._chains.requests, chain=self._chains.chain)

    def _make_room(self, lanes: int, tokens: int) -> None:
        """Have `lanes` idle lanes, and table columns for `tokens` positions, by doubling."""
        pages = -(-tokens // self.block_tokens)
        old = self._state.tables
        if pages > old.shape[1]:
            tables = np.zeros((old.shape[0], doubled(old.shape[1], pages)), np.int32)
            tables[:, : old.shape[1]] = old
            self._state = self._state._replace(tables=tables)
        missing = lanes - int(self._counters[IDLE])
        if missing > 0:
            self._add_lanes(doubled(old.shape[0], old.shape[0] + missing) - old.shape[0])

    def _lay_out_free(self) -> None:
        """Put all blocks into the stacks of unowned runs, the lowest on top."""
        free, total = self._state.free, self.total_blocks
        first = 0
        for order in reversed(range(SIZES if self._counters[RUNS] else 1)):
            size = BUDDIES**order
            heads = np.arange(first, total - size + 1, size)[::-1]
            free[: heads.size, STACK + order] = heads
            free[heads, ORDER] = order
            free[heads, PLACE] = np.arange(heads.size)
            self._counters[SINGLES + order] = heads.size
            first += heads.size * size

    def _add_lanes(self, count: int) -> None:
        """Append idle lanes."""
        s = self._state
        first = s.lanes.shape[0]
        lanes = np.zeros((count, LANE_FIELDS), np.int64)
        lanes[:, ROW] = -1
        lanes[:, NEXT] = np.arange(first + 1, first + count + 1)
        lanes[-1, NEXT] = self._counters[IDLE_HEAD]
        self._counters[IDLE_HEAD] = first
        self._counters[IDLE] += count
        tables = np.zeros((count, s.tables.shape[1]), np.int32)
        self._state = s._replace(
            lanes=np.concatenate([s.lanes, lanes]), tables=np.concatenate([s.tables, tables])
        )

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self._chains.requests):
            _raise(UNKNOWN_ROW)


def _i32(values: I32) -> I32:
    """The same numbers in the one form the kernels are compiled for."""
    return np.ascontiguousarray(values, np.int32)


def _raise(status: int) -> None:
    """Raise what a kernel's status means."""
    if status != OK:
        error, text = _WHAT[status]
        raise error(text)
