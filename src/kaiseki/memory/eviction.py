"""Which cached block is given up: ARC (Megiddo and Modha, FAST 2003), with leaves before their parents.

Cached blocks stand in two rings, each in the order in which they lost their last hold: `ONCE` those that one
request has used, `AGAIN` those that were attached since, or that came back soon after they had been given up
(see `ghosts`). The first gives one up while it has more than its share of the cached blocks, `TARGET` of
`STEPS` times all blocks; a ghost that comes back moves the target towards the queue it left. With `lru`
everything stands in the first ring.

A block without its parent can never be found again, so only leaves are given up. In a ring children come
before their parents: a lane lets go of its last page first, and every lane that holds a block holds its
ancestors. A child never stands in `AGAIN` when its parent is in `ONCE`: whoever attaches it attaches the
parent. So the head of `ONCE` is a leaf. The head of `AGAIN` may have children in `ONCE`; then the head of
`ONCE` goes in its place: it is at least as long unused as such a child is, and that as its parent. Two cases
need care, both after `changes.release` indexed a block under another row's parent: that parent may already
stand in a ring, then it moves behind its child (`enqueue`); and while the child waits for its fence it is in
no ring at all, then it loses its digest when its parent's turn comes (`_give_up_grafts`).

A pinned block, its parents with it, goes to the end of its ring when its turn comes; when only pinned ones
are left, none is pinned any more.

A block that is attached again leaves a hole, told by the block's own QUEUE and QUEUED. A ring of twice the
blocks is compacted when it is full, so at most once per total_blocks entries: amortised O(1).
"""

from __future__ import annotations

from kaiseki.core.jit import inlined, kernel
from kaiseki.memory.ghosts import STEPS, remember
from kaiseki.memory.layout import (
    AGAIN,
    CACHED,
    EVICTIONS,
    HEAD,
    HOLDS,
    KIDS,
    LENGTH,
    LONG,
    NEXT,
    ONCE,
    PARENT,
    PIN,
    PINS,
    QUEUE,
    QUEUED,
    ROOT,
    ROWS,
    TAIL,
    TARGET,
    UNINDEXED,
    WAITING_HEAD,
    State,
)
from kaiseki.memory.prefix import remove


@inlined
def enqueue(s: State, block: int) -> None:
    """An indexed block has lost its last hold: it is cached, and evictable when its turn comes."""
    s.counters[CACHED] += 1
    s.counters[LONG + s.blocks[block, QUEUE]] += 1
    _to_the_end(s, block)


@inlined
def dequeue(s: State, block: int) -> None:
    """A cached block is held again, or given up."""
    s.counters[CACHED] -= 1
    s.counters[LONG + s.blocks[block, QUEUE]] -= 1
    s.blocks[block, QUEUED] = -1


@kernel
def evict(s: State) -> int:
    """Take one block out of the cache. There must be one."""
    queue = _choose(s)
    block = _first_unpinned(s, queue)
    if block < 0:
        block = _first_unpinned(s, 1 - queue)
    if block < 0:
        s.counters[PINS] += 1
        block = _head(s, queue)
    if s.blocks[block, QUEUE] == AGAIN and s.blocks[block, KIDS] > 0:
        leaf = _first_unpinned(s, ONCE)
        if leaf >= 0:
            block = leaf
    if s.blocks[block, KIDS] > 0:
        _give_up_grafts(s, block)
    remember(s, block)
    dequeue(s, block)
    remove(s, block)
    s.counters[EVICTIONS] += 1
    return block


@inlined
def _choose(s: State) -> int:
    """The queue that is to give one up."""
    once, again = s.counters[LONG + ONCE], s.counters[LONG + AGAIN]
    if once == 0:
        return AGAIN
    over = once * STEPS * s.blocks.shape[0] > s.counters[TARGET] * (once + again)
    return ONCE if over or again == 0 else AGAIN


@inlined
def _head(s: State, queue: int) -> int:
    """The block longest in a queue, which must have one; it stays there."""
    mask = s.queues.shape[1] - 1
    while True:
        at = s.counters[HEAD + queue] & mask
        block = s.queues[queue, at]
        if s.blocks[block, QUEUED] == at and s.blocks[block, QUEUE] == queue:
            return int(block)
        s.counters[HEAD + queue] += 1


@inlined
def _first_unpinned(s: State, queue: int) -> int:
    """The longest in a queue that is not pinned, -1 without any; pinned ones before it go to the end."""
    for _ in range(s.counters[LONG + queue]):
        block = _head(s, queue)
        if s.blocks[block, PIN] != s.counters[PINS]:
            return block
        _to_the_end(s, block)
    return -1


@inlined
def _to_the_end(s: State, block: int) -> None:
    """Put a block at the end of its ring, and its cached ancestors behind it."""
    while block >= 0 and s.blocks[block, HOLDS] == 0:
        _append(s, block)
        block = s.blocks[block, PARENT]


@inlined
def _append(s: State, block: int) -> None:
    """Put a block at the end of its ring; an earlier entry of it becomes a hole."""
    mask = s.queues.shape[1] - 1
    queue = s.blocks[block, QUEUE]
    head, tail = HEAD + queue, TAIL + queue
    if s.counters[tail] - s.counters[head] == s.queues.shape[1]:
        write = s.counters[head]
        for read in range(s.counters[head], s.counters[tail]):
            moved = s.queues[queue, read & mask]
            if s.blocks[moved, QUEUED] == read & mask and s.blocks[moved, QUEUE] == queue:
                s.queues[queue, write & mask] = moved
                s.blocks[moved, QUEUED] = write & mask
                write += 1
        s.counters[tail] = write
    at = s.counters[tail] & mask
    s.queues[queue, at] = block
    s.blocks[block, QUEUED] = at
    s.counters[tail] += 1


@kernel
def _give_up_grafts(s: State, block: int) -> None:
    """Make a cached block a leaf: its children wait for fences, so take their digests away."""
    while s.blocks[block, KIDS] > 0:
        lane = s.counters[WAITING_HEAD]
        while lane >= 0:
            grafted = s.lanes[lane, LENGTH]
            before = ROOT
            for page_index in range(s.lanes[lane, LENGTH]):
                own = s.tables[lane, page_index]
                parent = s.blocks[own, PARENT]
                if parent != UNINDEXED and parent != before:
                    grafted = page_index
                    break
                before = own
            for page_index in range(s.lanes[lane, LENGTH] - 1, grafted - 1, -1):
                own = s.tables[lane, page_index]
                leaf = s.blocks[own, ROWS] == 0 and s.blocks[own, KIDS] == 0
                if leaf and s.blocks[own, PARENT] != UNINDEXED:
                    remove(s, own)
            lane = s.lanes[lane, NEXT]
