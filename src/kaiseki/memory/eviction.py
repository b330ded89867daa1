"""Which cached block is given up first: the longest unused one, leaves before their parents.

Cached blocks stand in a ring in the order in which they lost their last hold. A lane lets go of its last
page first, and every lane that holds a block holds its ancestors, so children come before their
parents: the head of the ring is always a leaf. Two cases need care, both after `changes.release` indexed
a block under another row's parent: that parent may already stand in the ring, then it moves behind its
child (`enqueue`); and while the child waits for its fence it is in no ring at all, then it loses its
digest when its parent's turn comes (`_give_up_grafts`).

A block that is attached again leaves a hole, told by the block's own QUEUED. A ring of twice the blocks
is compacted when it is full, so at most once per total_blocks entries: amortised O(1).
"""

from __future__ import annotations

from kaiseki.core.jit import inlined, kernel
from kaiseki.memory.layout import (
    CACHED,
    EVICTIONS,
    HOLDS,
    KIDS,
    LENGTH,
    NEXT,
    PARENT,
    QUEUE_HEAD,
    QUEUE_TAIL,
    QUEUED,
    ROOT,
    ROWS,
    UNINDEXED,
    WAITING_HEAD,
    State,
)
from kaiseki.memory.prefix import remove


@inlined
def enqueue(s: State, block: int) -> None:
    """An indexed block has lost its last hold: it is cached, and evictable when its turn comes."""
    s.counters[CACHED] += 1
    _append(s, block)
    parent = s.blocks[block, PARENT]
    while parent >= 0 and s.blocks[parent, HOLDS] == 0:
        _append(s, parent)
        parent = s.blocks[parent, PARENT]


@inlined
def dequeue(s: State, block: int) -> None:
    """A cached block is held again."""
    s.counters[CACHED] -= 1
    s.blocks[block, QUEUED] = -1


@inlined
def evict(s: State) -> int:
    """Take the longest unused block out of the cache. There must be one."""
    mask = s.queue.size - 1
    while True:
        at = s.counters[QUEUE_HEAD] & mask
        s.counters[QUEUE_HEAD] += 1
        block = s.queue[at]
        if s.blocks[block, QUEUED] == at:
            break
    if s.blocks[block, KIDS] > 0:
        _give_up_grafts(s, block)
    dequeue(s, block)
    remove(s, block)
    s.counters[EVICTIONS] += 1
    return int(block)


@inlined
def _append(s: State, block: int) -> None:
    """Put a block at the end of the ring; an earlier entry of it becomes a hole."""
    mask = s.queue.size - 1
    if s.counters[QUEUE_TAIL] - s.counters[QUEUE_HEAD] == s.queue.size:
        write = s.counters[QUEUE_HEAD]
        for read in range(s.counters[QUEUE_HEAD], s.counters[QUEUE_TAIL]):
            moved = s.queue[read & mask]
            if s.blocks[moved, QUEUED] == read & mask:
                s.queue[write & mask] = moved
                s.blocks[moved, QUEUED] = write & mask
                write += 1
        s.counters[QUEUE_TAIL] = write
    at = s.counters[QUEUE_TAIL] & mask
    s.queue[at] = block
    s.blocks[block, QUEUED] = at
    s.counters[QUEUE_TAIL] += 1


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
