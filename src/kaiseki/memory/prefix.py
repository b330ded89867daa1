"""Prefix index: which block holds the KV of a digest.

Indexed blocks form a forest: a block's parent holds the KV of the pages before it. Only leaves are ever
evicted (see `eviction`), because a block without its parent can never be found again. What follows:

- if a digest is indexed, so are all digests before it in its chain, and the longest cached prefix
  can be found by bisection instead of a walk;
- whoever holds an indexed block holds its ancestors too (rows hold prefixes, and a block is indexed
  under another row's parent only when its last row lets go), so a block without holds has no
  descendants in use by rows, and all of them can be evicted in the end: `free_blocks` counts them all.

The hash table is open addressing with linear probing. Entries carry the digest's first word, so that
probing and closing gaps touch nothing else.
"""

from __future__ import annotations

from kaiseki.core.jit import inlined
from kaiseki.memory.ghosts import recall
from kaiseki.memory.layout import (
    AGAIN,
    COUNT,
    KIDS,
    OFFSET,
    ONCE,
    PAGE,
    PARENT,
    PIN,
    QUEUE,
    SLOT,
    UNINDEXED,
    State,
)


@inlined
def find(s: State, at: int) -> int:
    """Block indexed under digest `s.chain[at]`, or -1."""
    mask = s.slots.shape[0] - 1
    tag = s.chain[at, 0]
    slot = tag & mask
    while s.slots[slot, 0] >= 0:
        if s.slots[slot, 1] == tag:
            block = s.slots[slot, 0]
            same = 0
            for word in range(8):
                if s.digests[block, word] == s.chain[at, word]:
                    same += 1
            if same == 8:
                return int(block)
        slot = (slot + 1) & mask
    return -1


@inlined
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


@inlined
def insert(s: State, block: int, at: int, parent: int) -> None:
    """Index a held block under digest `s.chain[at]`, which must not be indexed, as a child of `parent`."""
    for word in range(8):
        s.digests[block, word] = s.chain[at, word]
    mask = s.slots.shape[0] - 1
    tag = s.chain[at, 0]
    slot = tag & mask
    while s.slots[slot, 0] >= 0:
        slot = (slot + 1) & mask
    s.slots[slot, 0] = block
    s.slots[slot, 1] = tag
    s.blocks[block, SLOT] = slot
    s.blocks[block, PARENT] = parent
    # Never above its parent's: a block leaves before its parent does (see `eviction`).
    again = recall(s, at) and (parent < 0 or s.blocks[parent, QUEUE] == AGAIN)
    s.blocks[block, QUEUE] = AGAIN if again else ONCE
    s.blocks[block, PIN] = 0
    if parent >= 0:
        s.blocks[parent, KIDS] += 1


@inlined
def remove(s: State, block: int) -> None:
    """Take a childless block out of the index."""
    mask = s.slots.shape[0] - 1
    hole = s.blocks[block, SLOT]
    # Close the gap: an entry moves back unless its home lies after the hole. No tombstones remain.
    slot = (hole + 1) & mask
    while s.slots[slot, 0] >= 0:
        home = s.slots[slot, 1] & mask
        if (slot - home) & mask >= (slot - hole) & mask:
            s.slots[hole, 0] = s.slots[slot, 0]
            s.slots[hole, 1] = s.slots[slot, 1]
            s.blocks[s.slots[slot, 0], SLOT] = hole
            hole = slot
        slot = (slot + 1) & mask
    s.slots[hole, 0] = -1
    parent = s.blocks[block, PARENT]
    s.blocks[block, PARENT] = UNINDEXED
    if parent >= 0:
        s.blocks[parent, KIDS] -= 1
