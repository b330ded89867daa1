"""What happens to rows' blocks: one compiled call each, over all rows of a slot.

Each call first checks everything that can go wrong and only then changes anything. Arrays of the state
come one by one because unpacking a tuple of them costs more than most calls do.
"""

from __future__ import annotations

from kaiseki.core.decision import I32, I64
from kaiseki.core.jit import inlined, kernel
from kaiseki.memory.blocks import available, begin_wait, end_wait, let_go, make_free, share, take
from kaiseki.memory.lanes import add_waiting, close_lane, fixed, known, need, open_lane, set_committed
from kaiseki.memory.layout import (
    ADAPTS,
    AGAIN,
    COMMITTED,
    COPIES,
    COUNT,
    FENCE,
    HIT,
    HOLDS_BLOCKS,
    IDLE,
    INDEX_AT,
    INDEXED,
    LACKS_BLOCKS,
    LANE,
    LENGTH,
    NEXT,
    NO_BLOCKS_FREE,
    NO_LANE,
    NOT_A_CHAIN,
    OFFSET,
    OK,
    ONCE,
    PAGE,
    PARENT,
    PIN,
    PINS,
    PRIVATE,
    QUERIED,
    QUEUE,
    RETIRED,
    ROOT,
    ROW,
    ROWS,
    UNINDEXED,
    UNKNOWN_ROW,
    WAITING,
    WAITING_HEAD,
    State,
)
from kaiseki.memory.prefix import find, insert, longest_prefix


@kernel
def _can_reserve(s: State, rows: I32, starts: I32, ends: I32) -> tuple[int, int]:
    """Whether blocks, lanes and table columns suffice, and how many blocks it takes at most."""
    page = s.counters[PAGE]
    needed = 0
    opened = 0
    widest = 0
    for i in range(rows.size):
        lane = s.requests[rows[i], LANE]
        start = starts[i]
        end = ends[i]
        if end <= start:
            continue
        if lane < 0:
            needed += (end + page - 1) // page
            opened += 1
        elif start >= s.lanes[lane, PRIVATE] and end <= s.lanes[lane, LENGTH] * page:
            continue
        else:
            grow, replaced = need(s.blocks, s.lanes, s.tables, page, lane, start, end)
            needed += grow + replaced
        widest = max(widest, end)
    if needed > available(s):
        return NO_BLOCKS_FREE, 0
    if opened > s.counters[IDLE] or widest > s.tables.shape[1] * page:
        return NO_LANE, 0
    return OK, needed


@kernel
def reserve(
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
    starts: I32,
    ends: I32,
    copies: I32,
) -> tuple[int, int]:
    """(status, k): make [start, end) of each row writable; copies[:k] are (source, destination).

    `copies` is int32[B, 2]: every copy takes a block, so there are never more. No source is another's
    destination: it is let go of only when all blocks have been taken.
    """
    s = State(blocks, digests, slots, free, queues, ghosts, counters, lanes, tables, requests, chain)
    if not known(requests, rows):
        return UNKNOWN_ROW, 0
    status, needed = _can_reserve(s, rows, starts, ends)
    if status != OK:
        return status, 0
    make_free(s, needed)
    page = counters[PAGE]
    done = 0
    for i in range(rows.size):
        if ends[i] <= starts[i]:
            continue
        lane = requests[rows[i], LANE]
        if lane < 0:
            lane = open_lane(s, rows[i])
        if lanes[lane, COMMITTED] > starts[i]:
            set_committed(s, lane, starts[i])
        if starts[i] < lanes[lane, PRIVATE]:
            done = _replace_fixed(s, lane, starts[i] // page, copies, done)
        if ends[i] > lanes[lane, LENGTH] * page:
            _lengthen(s, lane, (ends[i] + page - 1) // page)
    for i in range(done):
        end_wait(s, copies[i, 0])
    counters[COPIES] += done
    return OK, done


@kernel
def _lengthen(s: State, lane: int, length: int) -> None:
    """Give the lane new blocks, so that it has `length`."""
    have = s.lanes[lane, LENGTH]
    block = s.tables[lane, have - 1] if have > 0 else -1
    for page_index in range(have, length):
        block = take(s, block, length - page_index)
        s.tables[lane, page_index] = block
    s.lanes[lane, LENGTH] = length


@kernel
def _replace_fixed(s: State, lane: int, first: int, copies: I32, done: int) -> int:
    """Give the lane its own copy of every fixed block from page `first` on; returns the copies so far."""
    for page_index in range(s.lanes[lane, LENGTH] - 1, first - 1, -1):
        block = s.tables[lane, page_index]
        if fixed(s.blocks, block):
            own = take(s, -1, 1)
            s.tables[lane, page_index] = own
            copies[done, 0] = block
            copies[done, 1] = own
            begin_wait(s, block)
            done += 1
    s.lanes[lane, PRIVATE] = first * s.counters[PAGE]
    s.lanes[lane, INDEXED] = min(s.lanes[lane, INDEXED], first)
    return done


@kernel
def commit(
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
    valid: I32,
) -> int:
    """Positions below valid[i] hold KV; index pages that became full. Rows without blocks are passed over."""
    s = State(blocks, digests, slots, free, queues, ghosts, counters, lanes, tables, requests, chain)
    if not known(requests, rows):
        return UNKNOWN_ROW
    for i in range(rows.size):
        lane = requests[rows[i], LANE]
        if lane < 0 or valid[i] <= lanes[lane, COMMITTED]:
            continue
        committed = min(valid[i], lanes[lane, LENGTH] * counters[PAGE])
        if committed < lanes[lane, INDEX_AT]:
            lanes[lane, COMMITTED] = committed
        else:
            set_committed(s, lane, committed)
            _index(s, lane)
    return OK


@inlined
def _full_pages(s: State, lane: int) -> int:
    """Pages that are computed in full and have a digest."""
    return int(min(s.lanes[lane, COMMITTED] // s.counters[PAGE], s.requests[s.lanes[lane, ROW], COUNT]))


@kernel
def _index(s: State, lane: int) -> int:
    """Index the lane's full pages in order, while each one's parent is the lane's own; returns their number.

    When two rows compute the same page at once the first is indexed and the other stays private, with
    everything after it, until it is released: see `_index_leaving`.
    """
    offset = s.requests[s.lanes[lane, ROW], OFFSET]
    full = _full_pages(s, lane)
    at = int(s.lanes[lane, INDEXED])
    while at < full:
        own = s.tables[lane, at]
        found = find(s, offset + at)
        if found < 0 and s.blocks[own, PARENT] == UNINDEXED:
            insert(s, own, offset + at, s.tables[lane, at - 1] if at > 0 else ROOT)
        elif found != own:
            break
        at += 1
    s.lanes[lane, INDEXED] = at
    s.lanes[lane, PRIVATE] = max(s.lanes[lane, PRIVATE], at * s.counters[PAGE])
    return at


@kernel
def _index_leaving(s: State, lane: int) -> None:
    """Index what a leaving lane alone holds, under others' blocks too where its own are duplicates.

    Not done earlier, because the parent could then be unheld while its child is held: see `prefix`.
    """
    full = _full_pages(s, lane)
    at = _index(s, lane)
    parent = s.tables[lane, at - 1] if at > 0 else ROOT
    offset = s.requests[s.lanes[lane, ROW], OFFSET]
    while at < full:
        own = s.tables[lane, at]
        found = find(s, offset + at)
        if found >= 0:
            parent = found
        elif s.blocks[own, ROWS] == 1 and s.blocks[own, PARENT] == UNINDEXED:
            insert(s, own, offset + at, parent)
            parent = own
        else:
            return
        at += 1


@kernel
def release(
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
    fences: I64,
) -> int:
    """Take all blocks from the rows; rows without any are passed over."""
    s = State(blocks, digests, slots, free, queues, ghosts, counters, lanes, tables, requests, chain)
    if not known(requests, rows):
        return UNKNOWN_ROW
    for i in range(rows.size):
        lane = requests[rows[i], LANE]
        if lane < 0:
            continue
        _index_leaving(s, lane)
        requests[rows[i], LANE] = -1
        waits = fences[i] > counters[RETIRED]
        # Last page first, so that children are queued for eviction before their parents.
        for page_index in range(lanes[lane, LENGTH] - 1, -1, -1):
            if waits:
                begin_wait(s, tables[lane, page_index])
            else:
                let_go(s, tables[lane, page_index])
        if waits:
            lanes[lane, ROW] = WAITING
            lanes[lane, FENCE] = fences[i]
            add_waiting(s, lane)
        else:
            close_lane(s, lane)
    return OK


@kernel
def retire(
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
    slot: int,
) -> None:
    """Free the blocks that waited for `slot` or an earlier one."""
    s = State(blocks, digests, slots, free, queues, ghosts, counters, lanes, tables, requests, chain)
    counters[RETIRED] = slot
    lane = counters[WAITING_HEAD]
    counters[WAITING_HEAD] = -1
    while lane >= 0:
        following = lanes[lane, NEXT]
        if lanes[lane, FENCE] > slot:
            add_waiting(s, lane)
        else:
            for page_index in range(lanes[lane, LENGTH] - 1, -1, -1):
                end_wait(s, tables[lane, page_index])
            close_lane(s, lane)
        lane = following


@kernel
def _can_attach(s: State, rows: I32, limits: I32) -> int:
    """Whether no row holds blocks, lanes and table columns suffice, and the digests are chains."""
    room = OK if rows.size <= s.counters[IDLE] else NO_LANE
    for i in range(rows.size):
        if s.requests[rows[i], LANE] >= 0:
            return HOLDS_BLOCKS
        pages, block = longest_prefix(s, rows[i], limits[i])
        if pages > s.tables.shape[1]:
            room = NO_LANE
        # The walk down from the last block must reach the first in just as many steps.
        for _ in range(pages):
            block = s.blocks[block, PARENT] if block >= 0 else UNINDEXED
        if block != ROOT:
            return NOT_A_CHAIN
    return room


@kernel
def attach(
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
    """Share each row's cached prefix with it; out[n] is its length in tokens."""
    s = State(blocks, digests, slots, free, queues, ghosts, counters, lanes, tables, requests, chain)
    if not known(requests, rows):
        return UNKNOWN_ROW
    status = _can_attach(s, rows, limits)
    if status != OK:
        return status
    page = counters[PAGE]
    for i in range(rows.size):
        pages, block = longest_prefix(s, rows[i], limits[i])
        out[i] = pages * page
        counters[QUERIED] += max(0, limits[i])
        counters[HIT] += out[i]
        if pages == 0:
            continue
        lane = open_lane(s, rows[i])
        for page_index in range(pages - 1, -1, -1):
            tables[lane, page_index] = block
            share(s, block)
            blocks[block, QUEUE] = AGAIN if counters[ADAPTS] else ONCE
            block = blocks[block, PARENT]
        lanes[lane, LENGTH] = pages
        lanes[lane, PRIVATE] = out[i]
        lanes[lane, INDEXED] = pages
        set_committed(s, lane, out[i])
    return OK


@kernel
def pin(
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
) -> int:
    """Pin each row's cached prefix, and nothing else: it is evicted when all other cached blocks are gone.

    Held blocks of it are marked, too: a pinned block's parent always is, so that it never comes before it
    in a queue (see `eviction`).
    """
    s = State(blocks, digests, slots, free, queues, ghosts, counters, lanes, tables, requests, chain)
    if not known(requests, rows):
        return UNKNOWN_ROW
    counters[PINS] += 1
    for i in range(rows.size):
        _, block = longest_prefix(s, rows[i], limits[i])
        while block >= 0 and blocks[block, PIN] != counters[PINS]:
            blocks[block, PIN] = counters[PINS]
            block = blocks[block, PARENT]
    return OK


@kernel
def fork(
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
    parent: int,
    child: int,
    tokens: int,
) -> int:
    """Share the parent's blocks that cover `tokens` positions with a child that holds none."""
    s = State(blocks, digests, slots, free, queues, ghosts, counters, lanes, tables, requests, chain)
    pages = (tokens + counters[PAGE] - 1) // counters[PAGE]
    if requests[child, LANE] >= 0:
        return HOLDS_BLOCKS
    if pages <= 0:
        return OK
    source = requests[parent, LANE]
    if source < 0 or lanes[source, LENGTH] < pages:
        return LACKS_BLOCKS
    if counters[IDLE] == 0:
        return NO_LANE
    lane = open_lane(s, child)
    for page_index in range(pages):
        block = tables[source, page_index]
        tables[lane, page_index] = block
        share(s, block)
    lanes[lane, LENGTH] = pages
    set_committed(s, lane, min(tokens, lanes[source, COMMITTED]))
    lanes[lane, PRIVATE] = pages * counters[PAGE]
    lanes[source, PRIVATE] = max(lanes[source, PRIVATE], lanes[lane, PRIVATE])
    return OK
