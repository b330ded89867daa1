"""Names for the columns of the pool's arrays.

Each table is one array with a row per thing (block, lane, request) and a column per field. A kernel
that looks at one block then touches one cache line, and a block not looked at lately is a cache miss of
up to 300 ns. A call hands ten arrays to compiled code instead of thirty, which at a microsecond a
call is most of what a call costs.
"""

from __future__ import annotations

from typing import NamedTuple

from kaiseki.core.decision import I32, I64

BLOCK_FIELDS = 8
ROWS, HOLDS, KIDS, PARENT, QUEUED, SLOT, QUEUE, PIN = range(BLOCK_FIELDS)
"""Columns of `State.blocks`.

ROWS: rows whose lane has the block. HOLDS: the same plus released lanes that wait for their fence.
KIDS: indexed blocks whose parent it is. PARENT: the indexed block before it in its chain, `ROOT` for
the first, `UNINDEXED` when no digest leads to the block. QUEUED: its place in the eviction queue or -1.
SLOT: its place in the hash table. QUEUE: the eviction queue where it is, or will be, `ONCE` or `AGAIN`.
PIN: pinned if this is `State.counters[PINS]`.
"""
ROOT, UNINDEXED = -1, -2
ONCE, AGAIN = 0, 1

SIZES = 3
ORDER, PLACE, STACK = range(3)
"""Columns of `State.free`: of the first block of an unowned run its size's number, else -1; its place in the
stack of that size; then the stacks, one column each.
"""

WAYS = 4
FIELDS = 3
WORD_0, WORD_1, LEFT = range(FIELDS)
"""Columns of an entry of `State.ghosts` (padded to 4): two words of a digest; 1 + its queue, 0 if empty."""

LANE_FIELDS = 8
ROW, LENGTH, PRIVATE, COMMITTED, INDEXED, INDEX_AT, FENCE, NEXT = range(LANE_FIELDS)
"""Columns of `State.lanes`.

ROW: request row, -1 for an idle lane, `WAITING` for a released one whose fence has not retired.
LENGTH: blocks held. PRIVATE: position from which on every block is the lane's own and not indexed, so
that writes there need no look at the blocks. COMMITTED: positions below hold computed KV. INDEXED:
leading blocks that are what the index holds under their digests. INDEX_AT: where the next page that
has a digest is full, so that `commit` must look at the index. FENCE: slot a waiting lane waits for.
NEXT: link in the list of idle lanes or of waiting ones.
"""
WAITING = -2
NEVER_INDEX = 2**62

REQUEST_FIELDS = 4
LANE, OFFSET, COUNT, ROOM = range(REQUEST_FIELDS)
"""Columns of `State.requests`.

LANE: the row's lane or -1. OFFSET, COUNT: where the row's digests are in `State.chain`, and how many.
ROOM: how many fit there.
"""

(
    PAGE,
    FREE,
    SINGLES,
    MEDIUM,
    LARGE,
    RUNS,
    CACHED,
    LIVE,
    LIMBO,
    HEAD,
    HEAD_AGAIN,
    TAIL,
    TAIL_AGAIN,
    LONG,
    LONG_AGAIN,
    GHOSTS,
    GHOSTS_AGAIN,
    TARGET,
    ADAPTS,
    PINS,
    RETIRED,
    WAITING_HEAD,
    WAITING_TAIL,
    IDLE_HEAD,
    IDLE,
    ALLOCATIONS,
    EVICTIONS,
    COPIES,
    QUERIED,
    HIT,
    N_COUNTERS,
) = range(31)
"""Entries of `State.counters`.

PAGE: tokens per block. FREE: unowned blocks without content, in `State.free`, in so many runs of each size:
SINGLES, MEDIUM, LARGE. RUNS: whether there are others than single ones. CACHED: indexed blocks without holds,
in `State.queues`. LIVE: blocks of rows. LIMBO: blocks that only waiting lanes hold. HEAD, TAIL, LONG of each
of two queues: entries taken from it, put into it, blocks in it. GHOSTS: how many of those in `State.ghosts`
left each queue. TARGET, ADAPTS, PINS: see `eviction`. RETIRED: last retired slot. WAITING_HEAD, WAITING_TAIL:
list of waiting lanes in order of release. IDLE_HEAD, IDLE: list and number of idle lanes. The rest count
events: blocks taken, cached blocks evicted, blocks copied, tokens asked of the cache by `attach`, found.
"""

OK, UNKNOWN_ROW, HOLDS_BLOCKS, LACKS_BLOCKS, NO_BLOCKS_FREE, NO_LANE, NOT_A_CHAIN = range(7)
"""What a kernel answers; anything but OK means that it changed nothing."""


class State(NamedTuple):
    """All arrays of a pool of B blocks, L lanes of at most W blocks, N request rows.

    Attributes:
        blocks: int32[B, BLOCK_FIELDS].
        digests: int32[B, 8], SHA-256 under which a block is indexed.
        slots: int32[power of two >= 2B, 2], open-addressing hash table: block (-1 none), digest word 0.
        free: int32[B, STACK + SIZES], unowned runs, see `buddy`.
        queues: int32[2, power of two >= 2B], rings of cached blocks, the longest unused first, with holes.
        ghosts: int32[power of two >= B / WAYS, WAYS, 4], pages given up of late; the last of a set first.
        counters: int64[N_COUNTERS].
        lanes: int64[L, LANE_FIELDS].
        tables: int32[L, W], block of each page of a lane.
        requests: int32[N, REQUEST_FIELDS].
        chain: int32[M, 8], digests of all registered rows.
    """

    blocks: I32
    digests: I32
    slots: I32
    free: I32
    queues: I32
    ghosts: I32
    counters: I64
    lanes: I64
    tables: I32
    requests: I32
    chain: I32
