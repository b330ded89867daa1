"""Unowned blocks as aligned runs of 1, 4 and 16 pages: a buddy allocator with three sizes of block.

The page stays the unit of ownership: any page of a run can be shared, cached or given up alone, so nothing is
reserved that nobody uses, and growth copies nothing. What the allocator decides is which page one gets: the
one behind the last if that is unowned, else the first of a run as long as what is wanted. Pages of a row then
stand side by side, and are swapped and sent in few pieces. Four neighbours that are unowned make a run of the
next size (Knowlton, CACM 1965, with four buddies instead of two). With `pages` there are single ones only, in
a stack.
"""

from __future__ import annotations

from kaiseki.core.jit import inlined
from kaiseki.memory.layout import FREE, ORDER, PLACE, RUNS, SINGLES, SIZES, STACK, State

BUDDIES = 4
"""Runs that make one of the next size."""


@inlined
def give_back(s: State, block: int) -> None:
    """A block becomes unowned, with its neighbours a run."""
    s.counters[FREE] += 1
    order, size = 0, 1
    whole = s.counters[RUNS] > 0
    while whole and order < SIZES - 1:
        first = block // (BUDDIES * size) * (BUDDIES * size)
        whole = first + BUDDIES * size <= s.free.shape[0]
        for other in range(first, first + BUDDIES * size, size):
            whole = whole and (other == block or s.free[other, ORDER] == order)
        if whole:
            for other in range(first, first + BUDDIES * size, size):
                if other != block:
                    _pull(s, other, order)
            block, order, size = first, order + 1, BUDDIES * size
    _push(s, block, order)


@inlined
def get(s: State, after: int, wanted: int) -> int:
    """One unowned block, of which there must be one.

    Args:
        after: the block before it in its row, -1 for none.
        wanted: how many will be asked for in turn, this one included.
    """
    block, order = after + 1, -1
    if s.counters[RUNS] > 0 and 0 < block < s.free.shape[0]:
        order = int(s.free[block, ORDER])
    if order < 0:
        order = _size_for(s, wanted)
        block = int(s.free[s.counters[SINGLES + order] - 1, STACK + order])
    _pull(s, block, order)
    s.counters[FREE] -= 1
    while order > 0:
        order -= 1
        size = BUDDIES**order
        for i in range(BUDDIES - 1, 0, -1):
            _push(s, block + i * size, order)
    return block


@inlined
def _size_for(s: State, wanted: int) -> int:
    """The largest size that is used up whole, or else one larger, or else the largest there is."""
    order, size = 0, BUDDIES
    while order < SIZES - 1 and size <= wanted:
        order, size = order + 1, BUDDIES * size
    larger = order
    while larger < SIZES and s.counters[SINGLES + larger] == 0:
        larger += 1
    if larger < SIZES:
        return larger
    while s.counters[SINGLES + order] == 0:
        order -= 1
    return order


@inlined
def _push(s: State, block: int, order: int) -> None:
    """Put a run on the stack of its size."""
    place = s.counters[SINGLES + order]
    s.free[place, STACK + order] = block
    s.free[block, ORDER] = order
    s.free[block, PLACE] = place
    s.counters[SINGLES + order] += 1


@inlined
def _pull(s: State, block: int, order: int) -> None:
    """Take a run out of its stack, wherever it is there."""
    s.counters[SINGLES + order] -= 1
    last = s.free[s.counters[SINGLES + order], STACK + order]
    place = s.free[block, PLACE]
    s.free[place, STACK + order] = last
    s.free[last, PLACE] = place
    s.free[block, ORDER] = -1
