"""What the pool can be asked about rows: one compiled call each, over all rows of a slot.

Nothing here changes the pool. Arrays of the state come one by one because unpacking a tuple of them
costs more than most calls do.
"""

from __future__ import annotations

from kaiseki.core.decision import I32, I64
from kaiseki.core.jit import kernel
from kaiseki.memory.lanes import known, need
from kaiseki.memory.layout import (
    COMMITTED,
    HOLDS,
    LACKS_BLOCKS,
    LANE,
    LENGTH,
    OK,
    PAGE,
    PARENT,
    PRIVATE,
    ROWS,
    UNKNOWN_ROW,
    State,
)
from kaiseki.memory.prefix import longest_prefix


@kernel
def growth_need(
    blocks: I32,
    counters: I64,
    lanes: I64,
    tables: I32,
    requests: I32,
    rows: I32,
    starts: I32,
    ends: I32,
    out: I32,
) -> int:
    """Fill out[n] with the blocks each row needs, independently of the others."""
    if not known(requests, rows):
        return UNKNOWN_ROW
    page = counters[PAGE]
    for i in range(rows.size):
        lane = requests[rows[i], LANE]
        start = starts[i]
        end = ends[i]
        if end <= start:
            out[i] = 0
        elif lane < 0:
            out[i] = (end + page - 1) // page
        elif start >= lanes[lane, PRIVATE] and end <= lanes[lane, LENGTH] * page:
            out[i] = 0
        else:
            grow, copies = need(blocks, lanes, tables, page, lane, start, end)
            out[i] = grow + copies
    return OK


@kernel
def cached_tokens(
    blocks: I32,
    digests: I32,
    slots: I32,
    free: I32,
    queues: I32,
    ghosts: I32,
    counters: I64,
    lanes: I64,
    tables: I32,
    requests: I32,
    chain: I32,
    rows: I32,
    limits: I32,
    out: I32,
) -> int:
    """Fill out[n, 2] with the tokens of each row's cached prefix and its blocks that count as free.

    Of a row that holds blocks: what is computed in them, and none.
    """
    s = State(blocks, digests, slots, free, queues, ghosts, counters, lanes, tables, requests, chain)
    if not known(requests, rows):
        return UNKNOWN_ROW
    for i in range(rows.size):
        lane = requests[rows[i], LANE]
        if lane >= 0:
            out[i, 0] = max(0, min(lanes[lane, COMMITTED], limits[i]))
            out[i, 1] = 0
            continue
        pages, block = longest_prefix(s, rows[i], limits[i])
        out[i, 0] = pages * counters[PAGE]
        unheld = 0
        # From the first live block on, all ancestors are live too.
        while block >= 0 and blocks[block, ROWS] == 0:
            if blocks[block, HOLDS] == 0:
                unheld += 1
            block = blocks[block, PARENT]
        out[i, 1] = unheld
    return OK


@kernel
def reclaimable(
    blocks: I32, lanes: I64, tables: I32, requests: I32, scratch: I32, rows: I32, out: I64
) -> int:
    """Fill out[n] with the blocks that the first i + 1 rows hold alone, together; scratch[B] stays zero."""
    if not known(requests, rows):
        return UNKNOWN_ROW
    freed = 0
    for i in range(rows.size):
        lane = requests[rows[i], LANE]
        if lane >= 0:
            for page_index in range(lanes[lane, LENGTH]):
                block = tables[lane, page_index]
                scratch[block] += 1
                if scratch[block] == blocks[block, ROWS]:
                    freed += 1
        out[i] = freed
    for row in rows:
        lane = requests[row, LANE]
        if lane >= 0:
            for page_index in range(lanes[lane, LENGTH]):
                scratch[tables[lane, page_index]] = 0
    return OK


@kernel
def tables_of(counters: I64, lanes: I64, tables: I32, requests: I32, rows: I32, ends: I32, out: I32) -> int:
    """Fill out[n, pages of the longest end] with the block tables, padded with 0."""
    if not known(requests, rows):
        return UNKNOWN_ROW
    page = counters[PAGE]
    for i in range(rows.size):
        lane = requests[rows[i], LANE]
        if ends[i] > 0 and (lane < 0 or ends[i] > lanes[lane, LENGTH] * page):
            return LACKS_BLOCKS
        pages = max(0, (ends[i] + page - 1) // page)
        for page_index in range(pages):
            out[i, page_index] = tables[lane, page_index]
        for page_index in range(pages, out.shape[1]):
            out[i, page_index] = 0
    return OK
