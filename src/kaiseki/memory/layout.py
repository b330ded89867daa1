"""Names for the columns of the pool's arrays.

Each table is one array with a row per thing (block, lane, request) and a column per field: a kernel
that looks at one block then touches one cache line, and a call hands nine arrays to compiled code
instead of thirty, which at a microsecond a call is most of what a call costs.
"""

from __future__ import annotations

from typing import NamedTuple

from kaiseki.core.decision import I32, I64

BLOCK_FIELDS = 8
REFS, KIDS, PARENT, HEAP_AT, STAMP, FENCE, NEXT, LISTED = range(BLOCK_FIELDS)
"""Columns of `State.blocks`.

REFS: lanes whose table has the block. KIDS: indexed blocks whose parent it is. PARENT: the indexed
block before it in its chain, `ROOT` for the first, `UNINDEXED` when no digest leads to the block.
HEAP_AT: its place in the eviction heap or -1. STAMP: clock of its last release. FENCE: the last slot
that may still touch it. NEXT: link in the list of unowned blocks or, while LISTED is 1, in the list of
blocks waiting for their fence (where a block stays when it is attached again meanwhile).
"""
ROOT, UNINDEXED = -1, -2

LANE_FIELDS = 8
ROW, LENGTH, CAPACITY, PRIVATE, COMMITTED, INDEXED, INDEX_AT, NEXT_IDLE = range(LANE_FIELDS)
"""Columns of `State.lanes`.

ROW: request row, -1 for an idle lane. LENGTH: blocks held; CAPACITY: the same in tokens. PRIVATE:
position from which on every block is the lane's own and not indexed, so that writes there need no
look at the blocks. COMMITTED: positions below hold computed KV. INDEXED: leading blocks that are what
the index holds under their digests. INDEX_AT: `commit` must look at the index when this position is
reached. NEXT_IDLE: link in the list of idle lanes.
"""
NEVER_INDEX = 2**31 - 1

REQUEST_FIELDS = 4
LANE, OFFSET, COUNT, ROOM = range(REQUEST_FIELDS)
"""Columns of `State.requests`.

LANE: the row's lane or -1. OFFSET, COUNT: where the row's digests are in `State.chain`, and how many.
ROOM: how many fit there.
"""

(
    PAGE,
    FREE_HEAD,
    FREE,
    HEAP_SIZE,
    CACHED,
    LIVE,
    LIMBO,
    LIMBO_HEAD,
    RETIRED,
    CLOCK,
    IDLE_HEAD,
    IDLE,
    ALLOCATIONS,
    EVICTIONS,
    COPIES,
    QUERIED,
    HIT,
    N_COUNTERS,
) = range(18)
"""Entries of `State.counters`.

PAGE: tokens per block. FREE_HEAD, FREE: list and number of unowned blocks without content. CACHED:
indexed blocks that nobody holds and no fence protects; HEAP_SIZE of them are leaves. LIVE: held blocks.
LIMBO: blocks nobody holds that wait for a fence; LIMBO_HEAD: their list. RETIRED: last retired slot.
CLOCK: releases so far. IDLE_HEAD, IDLE: list and number of idle lanes. The rest count events:
blocks taken, cached blocks evicted, blocks copied, tokens asked of the cache by `attach` and found.
"""

OK, UNKNOWN_ROW, HOLDS_BLOCKS, LACKS_BLOCKS, NO_BLOCKS_FREE, NO_LANE, NOT_A_CHAIN = range(7)
"""What a kernel answers; anything but OK means that it changed nothing."""


class State(NamedTuple):
    """All arrays of a pool of B blocks, L lanes of at most W blocks, N request rows.

    Attributes:
        blocks: int64[B, BLOCK_FIELDS].
        digests: int64[B, 4], SHA-256 under which a block is indexed.
        slots: int32[power of two >= 2B], open-addressing hash table of blocks by digest, -1 empty.
        heap: int32[B], binary heap of evictable blocks, the longest unused first.
        counters: int64[N_COUNTERS].
        lanes: int32[L, LANE_FIELDS].
        tables: int32[L, W], block of each page of a lane.
        requests: int32[N, REQUEST_FIELDS].
        chain: int64[M, 4], digests of all registered rows.

    """

    blocks: I64
    digests: I64
    slots: I32
    heap: I32
    counters: I64
    lanes: I32
    tables: I32
    requests: I32
    chain: I64
