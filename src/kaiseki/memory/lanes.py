"""A lane is the block table of one row that holds blocks.

The request table may hold a million waiting rows; only the few that hold blocks have a lane.
"""

from __future__ import annotations

from kaiseki.core.decision import I32, I64
from kaiseki.core.jit import inlined
from kaiseki.memory.layout import (
    COMMITTED,
    COUNT,
    IDLE,
    IDLE_HEAD,
    INDEX_AT,
    INDEXED,
    LANE,
    LENGTH,
    NEVER_INDEX,
    NEXT,
    PAGE,
    PARENT,
    PRIVATE,
    ROW,
    ROWS,
    UNINDEXED,
    WAITING_HEAD,
    WAITING_TAIL,
    State,
)


@inlined
def known(requests: I32, rows: I32) -> bool:
    """Whether all rows are inside the request table."""
    outside = 0
    for row in rows:
        if row < 0 or row >= requests.shape[0]:
            outside += 1
    return outside == 0


@inlined
def open_lane(s: State, row: int) -> int:
    """An idle lane, now the row's, without blocks. The caller has made sure that there is one."""
    lane = s.counters[IDLE_HEAD]
    s.counters[IDLE_HEAD] = s.lanes[lane, NEXT]
    s.counters[IDLE] -= 1
    s.lanes[lane, ROW] = row
    s.lanes[lane, LENGTH] = 0
    s.lanes[lane, PRIVATE] = 0
    s.lanes[lane, INDEXED] = 0
    set_committed(s, lane, 0)
    s.requests[row, LANE] = lane
    return int(lane)


@inlined
def add_waiting(s: State, lane: int) -> None:
    """Put the lane at the end of the waiting list."""
    s.lanes[lane, NEXT] = -1
    if s.counters[WAITING_HEAD] < 0:
        s.counters[WAITING_HEAD] = lane
    else:
        s.lanes[s.counters[WAITING_TAIL], NEXT] = lane
    s.counters[WAITING_TAIL] = lane


@inlined
def close_lane(s: State, lane: int) -> None:
    """The lane is idle again; its blocks have been dealt with."""
    s.lanes[lane, ROW] = -1
    s.lanes[lane, NEXT] = s.counters[IDLE_HEAD]
    s.counters[IDLE_HEAD] = lane
    s.counters[IDLE] += 1


@inlined
def set_committed(s: State, lane: int, tokens: int) -> None:
    """Note how much KV is computed, and that the index is to be looked at when the next page is full."""
    full = tokens // s.counters[PAGE]
    more = full < s.requests[s.lanes[lane, ROW], COUNT]
    s.lanes[lane, COMMITTED] = tokens
    s.lanes[lane, INDEX_AT] = (full + 1) * s.counters[PAGE] if more else NEVER_INDEX


@inlined
def fixed(blocks: I32, block: int) -> bool:
    """Whether a block must not be written to: others read it, or the index promises its content."""
    return bool(blocks[block, ROWS] > 1 or blocks[block, PARENT] != UNINDEXED)


@inlined
def need(blocks: I32, lanes: I64, tables: I32, page: int, lane: int, start: int, end: int) -> tuple[int, int]:
    """(new blocks, copies) for one lane to write [start, end).

    Positions from `start` on lose their content, so fixed blocks are replaced up to the lane's end, not
    only up to `end`: a lane that kept an indexed block behind one it has replaced would hold a block
    without holding its parent.
    """
    length = lanes[lane, LENGTH]
    grow = max(0, (end + page - 1) // page - length)
    copies = 0
    if start < lanes[lane, PRIVATE]:
        for page_index in range(start // page, length):
            if fixed(blocks, tables[lane, page_index]):
                copies += 1
    return grow, copies
