"""One block's life: unowned, live, in limbo, cached, evicted.

Every block is in exactly one state, told by its fields:

| state   | ROWS | HOLDS | PARENT    | counted in |
|---------|------|-------|-----------|------------|
| unowned | 0    | 0     | UNINDEXED | FREE       |
| cached  | 0    | 0     | indexed   | CACHED     |
| limbo   | 0    | > 0   | any       | LIMBO      |
| live    | > 0  | > 0   | any       | LIVE       |
"""

from __future__ import annotations

from kaiseki.core.jit import inlined, kernel
from kaiseki.memory.buddy import get, give_back
from kaiseki.memory.eviction import dequeue, enqueue, evict
from kaiseki.memory.layout import (
    ALLOCATIONS,
    CACHED,
    FREE,
    HOLDS,
    LIMBO,
    LIVE,
    PARENT,
    ROWS,
    UNINDEXED,
    State,
)


@inlined
def available(s: State) -> int:
    """Blocks that can be taken now."""
    return int(s.counters[FREE] + s.counters[CACHED])


@kernel
def make_free(s: State, blocks: int) -> None:
    """Have so many unowned blocks, by evicting cached ones. The caller has made sure that there are enough.

    All at once and before the first is taken: pages of one prefix leave one after the other, and make runs.
    """
    while s.counters[FREE] < blocks:
        give_back(s, evict(s))


@inlined
def take(s: State, after: int, wanted: int) -> int:
    """Own an unowned block, of which there must be one; see `buddy.get`."""
    s.counters[ALLOCATIONS] += 1
    s.counters[LIVE] += 1
    block = get(s, after, wanted)
    s.blocks[block, ROWS] = 1
    s.blocks[block, HOLDS] = 1
    return block


@inlined
def share(s: State, block: int) -> None:
    """One more row for a block that is live, cached or in limbo."""
    if s.blocks[block, ROWS] == 0:
        s.counters[LIVE] += 1
        if s.blocks[block, HOLDS] > 0:
            s.counters[LIMBO] -= 1
        else:
            dequeue(s, block)
    s.blocks[block, ROWS] += 1
    s.blocks[block, HOLDS] += 1


@inlined
def let_go(s: State, block: int) -> None:
    """One row less, at once."""
    s.blocks[block, ROWS] -= 1
    s.blocks[block, HOLDS] -= 1
    if s.blocks[block, ROWS] == 0:
        s.counters[LIVE] -= 1
        if s.blocks[block, HOLDS] > 0:
            s.counters[LIMBO] += 1
        else:
            _rest(s, block)


@inlined
def begin_wait(s: State, block: int) -> None:
    """One row less, whose hold stays until `end_wait`."""
    s.blocks[block, ROWS] -= 1
    if s.blocks[block, ROWS] == 0:
        s.counters[LIVE] -= 1
        s.counters[LIMBO] += 1


@inlined
def end_wait(s: State, block: int) -> None:
    """One hold less."""
    s.blocks[block, HOLDS] -= 1
    if s.blocks[block, HOLDS] == 0:
        s.counters[LIMBO] -= 1
        _rest(s, block)


@inlined
def _rest(s: State, block: int) -> None:
    """A block without holds becomes cached or unowned."""
    if s.blocks[block, PARENT] == UNINDEXED:
        give_back(s, block)
    else:
        enqueue(s, block)
