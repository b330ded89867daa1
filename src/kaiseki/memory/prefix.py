"""Prefix index and eviction: which block holds the KV of a digest, and which cached block goes first.

Indexed blocks form a forest: a block's parent holds the KV of the pages before it. Only leaves are ever
evicted, the longest unused first, because a block without its parent can never be found again. What
follows from that:

- if a digest is indexed, so are all digests before it in its chain, and the longest cached prefix
  can be found by bisection instead of a walk;
- whoever holds an indexed block holds its ancestors too (rows hold prefixes, and a block is indexed
  under another row's parent only when its last owner lets go), so an unheld block has no held
  descendants, and every unheld block can be evicted in the end. `free_blocks` may count them all.

Leaves sit in an indexed binary heap: O(log n) to enter, leave and evict, no scan.
"""

from __future__ import annotations

from kaiseki.core.jit import njit
from kaiseki.memory.layout import (
    COUNT,
    HEAP_AT,
    HEAP_SIZE,
    KIDS,
    LISTED,
    OFFSET,
    PAGE,
    PARENT,
    REFS,
    STAMP,
    UNINDEXED,
    State,
)


@njit
def find(s: State, at: int) -> int:
    """Block indexed under digest `s.chain[at]`, or -1."""
    mask = s.slots.size - 1
    first = s.chain[at, 0]
    slot = first & mask
    while True:
        block = s.slots[slot]
        if block < 0:
            return -1
        if (
            s.digests[block, 0] == first
            and s.digests[block, 1] == s.chain[at, 1]
            and s.digests[block, 2] == s.chain[at, 2]
            and s.digests[block, 3] == s.chain[at, 3]
        ):
            return int(block)
        slot = (slot + 1) & mask


@njit
def longest_prefix(s: State, row: int, limit: int) -> tuple[int, int]:
    """(pages, last block) of the row's longest indexed prefix within `limit` tokens; block -1 if none.

    Doubles, then bisects: presence along a chain is monotone (see the top of the file).
    """
    most = min(s.requests[row, COUNT], limit // s.counters[PAGE])
    offset = s.requests[row, OFFSET]
    have = 0
    last = -1
    beyond = most + 1
    probe = 1
    while have < most and have + 1 < beyond:
        block = find(s, offset + probe - 1)
        if block >= 0:
            have = probe
            last = block
        else:
            beyond = probe
        probe = min(2 * probe, most) if beyond > most else (have + beyond) // 2
    return have, last


@njit
def insert(s: State, block: int, at: int, parent: int) -> None:
    """Index a held block under digest `s.chain[at]`, which must not be indexed, as a child of `parent`."""
    for word in range(4):
        s.digests[block, word] = s.chain[at, word]
    mask = s.slots.size - 1
    slot = s.digests[block, 0] & mask
    while s.slots[slot] >= 0:
        slot = (slot + 1) & mask
    s.slots[slot] = block
    s.blocks[block, PARENT] = parent
    if parent >= 0:
        s.blocks[parent, KIDS] += 1
        if s.blocks[parent, HEAP_AT] >= 0:
            leave_heap(s, parent)


@njit
def remove(s: State, block: int) -> None:
    """Take a childless block out of the index; its parent may become evictable."""
    mask = s.slots.size - 1
    hole = s.digests[block, 0] & mask
    while s.slots[hole] != block:
        hole = (hole + 1) & mask
    # Close the gap: an entry moves back unless its home lies after the hole. No tombstones remain.
    slot = (hole + 1) & mask
    while s.slots[slot] >= 0:
        home = s.digests[s.slots[slot], 0] & mask
        if (slot - home) & mask >= (slot - hole) & mask:
            s.slots[hole] = s.slots[slot]
            hole = slot
        slot = (slot + 1) & mask
    s.slots[hole] = -1
    parent = s.blocks[block, PARENT]
    s.blocks[block, PARENT] = UNINDEXED
    if parent >= 0:
        s.blocks[parent, KIDS] -= 1
        if s.blocks[parent, KIDS] == 0 and s.blocks[parent, REFS] == 0 and s.blocks[parent, LISTED] == 0:
            enter_heap(s, parent)


@njit
def enter_heap(s: State, block: int) -> None:
    """Make an unheld leaf evictable."""
    at = s.counters[HEAP_SIZE]
    s.counters[HEAP_SIZE] += 1
    _sift_up(s, at, block)


@njit
def leave_heap(s: State, block: int) -> None:
    """Take a block out of the heap, wherever it stands."""
    s.counters[HEAP_SIZE] -= 1
    size = s.counters[HEAP_SIZE]
    at = s.blocks[block, HEAP_AT]
    s.blocks[block, HEAP_AT] = -1
    if at == size:
        return
    moved = s.heap[size]
    if at > 0 and s.blocks[moved, STAMP] < s.blocks[s.heap[(at - 1) // 2], STAMP]:
        _sift_up(s, at, moved)
    else:
        _sift_down(s, at, moved)


@njit
def _sift_up(s: State, at: int, block: int) -> None:
    stamp = s.blocks[block, STAMP]
    while at > 0:
        above = (at - 1) // 2
        other = s.heap[above]
        if s.blocks[other, STAMP] <= stamp:
            break
        s.heap[at] = other
        s.blocks[other, HEAP_AT] = at
        at = above
    s.heap[at] = block
    s.blocks[block, HEAP_AT] = at


@njit
def _sift_down(s: State, at: int, block: int) -> None:
    stamp = s.blocks[block, STAMP]
    size = s.counters[HEAP_SIZE]
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and s.blocks[s.heap[below + 1], STAMP] < s.blocks[s.heap[below], STAMP]:
            below += 1
        other = s.heap[below]
        if s.blocks[other, STAMP] >= stamp:
            break
        s.heap[at] = other
        s.blocks[other, HEAP_AT] = at
        at = below
    s.heap[at] = block
    s.blocks[block, HEAP_AT] = at
