"""One block's life: unowned, held, waiting for a fence, cached, evicted.

Every block is in exactly one state, told by its fields:

| state    | REFS | LISTED | PARENT      | counted in |
|----------|------|--------|-------------|------------|
| unowned  | 0    | 0      | UNINDEXED   | FREE       |
| cached   | 0    | 0      | indexed     | CACHED     |
| limbo    | 0    | 1      | any         | LIMBO      |
| held     | > 0  | any    | any         | LIVE       |
"""

from __future__ import annotations

from kaiseki.core.jit import njit
from kaiseki.memory.layout import (
    ALLOCATIONS,
    CACHED,
    EVICTIONS,
    FENCE,
    FREE,
    FREE_HEAD,
    HEAP_AT,
    HEAP_SIZE,
    KIDS,
    LIMBO,
    LIMBO_HEAD,
    LISTED,
    LIVE,
    NEXT,
    PARENT,
    REFS,
    RETIRED,
    UNINDEXED,
    State,
)
from kaiseki.memory.prefix import enter_heap, leave_heap, remove


@njit
def available(s: State) -> int:
    """Blocks that can be taken now."""
    return int(s.counters[FREE] + s.counters[CACHED])


@njit
def take(s: State) -> int:
    """Own a block with no content: an unowned one, else the longest unused cached leaf.

    The caller has made sure that one is available.
    """
    s.counters[ALLOCATIONS] += 1
    s.counters[LIVE] += 1
    if s.counters[FREE] > 0:
        block = s.counters[FREE_HEAD]
        s.counters[FREE_HEAD] = s.blocks[block, NEXT]
        s.counters[FREE] -= 1
    else:
        if s.counters[HEAP_SIZE] == 0:
            _uncover(s)
        block = s.heap[0]
        leave_heap(s, block)
        remove(s, block)
        s.counters[CACHED] -= 1
        s.counters[EVICTIONS] += 1
    s.blocks[block, REFS] = 1
    return int(block)


@njit
def share(s: State, block: int) -> None:
    """One more owner for a block that is held, cached or in limbo."""
    if s.blocks[block, REFS] == 0:
        s.counters[LIVE] += 1
        if s.blocks[block, LISTED] == 1:
            s.counters[LIMBO] -= 1
        else:
            s.counters[CACHED] -= 1
            if s.blocks[block, HEAP_AT] >= 0:
                leave_heap(s, block)
    s.blocks[block, REFS] += 1


@njit
def drop(s: State, block: int) -> None:
    """A block whose last owner has let go (REFS is 0): wait for its fence, or be free."""
    s.counters[LIVE] -= 1
    if s.blocks[block, LISTED] == 1:
        s.counters[LIMBO] += 1
    elif s.blocks[block, FENCE] > s.counters[RETIRED]:
        s.blocks[block, LISTED] = 1
        s.blocks[block, NEXT] = s.counters[LIMBO_HEAD]
        s.counters[LIMBO_HEAD] = block
        s.counters[LIMBO] += 1
    else:
        _rest(s, block)


@njit
def lift_fences(s: State, slot: int) -> None:
    """Free what waited for `slot` or an earlier one; held blocks only leave the list."""
    s.counters[RETIRED] = slot
    block = s.counters[LIMBO_HEAD]
    s.counters[LIMBO_HEAD] = -1
    while block >= 0:
        following = s.blocks[block, NEXT]
        if s.blocks[block, FENCE] > slot:
            s.blocks[block, NEXT] = s.counters[LIMBO_HEAD]
            s.counters[LIMBO_HEAD] = block
        else:
            s.blocks[block, LISTED] = 0
            if s.blocks[block, REFS] == 0:
                s.counters[LIMBO] -= 1
                _rest(s, block)
        block = following


@njit
def _rest(s: State, block: int) -> None:
    """An unheld, unfenced block becomes cached or unowned."""
    if s.blocks[block, PARENT] == UNINDEXED:
        s.blocks[block, NEXT] = s.counters[FREE_HEAD]
        s.counters[FREE_HEAD] = block
        s.counters[FREE] += 1
    else:
        s.counters[CACHED] += 1
        if s.blocks[block, KIDS] == 0:
            enter_heap(s, block)


@njit
def _uncover(s: State) -> None:
    """Make a cached block evictable when all of them have children.

    Those children can only be blocks in limbo that were indexed under another row's parent when they
    were released (`kernels.release`). They lose their digests, leaves first, until a parent is bare.
    """
    while s.counters[HEAP_SIZE] == 0:
        block = s.counters[LIMBO_HEAD]
        while block >= 0 and s.counters[HEAP_SIZE] == 0:
            bare = s.blocks[block, REFS] == 0 and s.blocks[block, KIDS] == 0
            if bare and s.blocks[block, PARENT] != UNINDEXED:
                remove(s, block)
            block = s.blocks[block, NEXT]
