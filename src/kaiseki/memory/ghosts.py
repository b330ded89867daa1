"""Ghosts: digests of pages that were given up of late, and what their coming back teaches.

A page that is computed again though it was here a while ago says that its queue is too short. Ghosts stand in
a table of about as many places as there are blocks, `WAYS` to a set; a new one pushes the oldest of its set
out. Two words of a digest tell pages apart well enough: a mix-up moves a target by a step, and no KV is found
here.
"""

from __future__ import annotations

from kaiseki.core.jit import inlined
from kaiseki.memory.layout import (
    ADAPTS,
    AGAIN,
    FIELDS,
    GHOSTS,
    LEFT,
    ONCE,
    QUEUE,
    TARGET,
    WAYS,
    WORD_0,
    WORD_1,
    State,
)

STEPS = 10
"""Steps by which a page's share of the cache is divided: hits in a tree come in chains of many pages, and
with a whole page per hit, as in ARC, the target runs from end to end (`docs/memory.md`)."""


@inlined
def remember(s: State, block: int) -> None:
    """A cached block is about to be given up."""
    if s.counters[ADAPTS] == 0:
        return
    home = s.digests[block, 0] & (s.ghosts.shape[0] - 1)
    pushed_out = s.ghosts[home, WAYS - 1, LEFT]
    if pushed_out > 0:
        s.counters[GHOSTS + pushed_out - 1] -= 1
    for way in range(WAYS - 1, 0, -1):
        for field in range(FIELDS):
            s.ghosts[home, way, field] = s.ghosts[home, way - 1, field]
    s.ghosts[home, 0, WORD_0] = s.digests[block, 0]
    s.ghosts[home, 0, WORD_1] = s.digests[block, 1]
    s.ghosts[home, 0, LEFT] = 1 + s.blocks[block, QUEUE]
    s.counters[GHOSTS + s.blocks[block, QUEUE]] += 1


@inlined
def recall(s: State, at: int) -> bool:
    """Whether digest `s.chain[at]`, now indexed, is a ghost. If so, the target moves and it is gone."""
    if s.counters[ADAPTS] == 0:
        return False
    home = s.chain[at, 0] & (s.ghosts.shape[0] - 1)
    found = -1
    for way in range(WAYS):
        same = s.ghosts[home, way, WORD_0] == s.chain[at, 0] and s.ghosts[home, way, WORD_1] == s.chain[at, 1]
        if same and s.ghosts[home, way, LEFT] > 0:
            found = way
    if found < 0:
        return False
    left = s.ghosts[home, found, LEFT] - 1
    once, again = s.counters[GHOSTS + ONCE], s.counters[GHOSTS + AGAIN]
    if left == ONCE:
        s.counters[TARGET] = min(s.counters[TARGET] + max(1, again // once), STEPS * s.blocks.shape[0])
    else:
        s.counters[TARGET] = max(s.counters[TARGET] - max(1, once // again), 0)
    s.counters[GHOSTS + left] -= 1
    for way in range(found, WAYS - 1):
        for field in range(FIELDS):
            s.ghosts[home, way, field] = s.ghosts[home, way + 1, field]
    s.ghosts[home, WAYS - 1, LEFT] = 0
    return True
