"""The pool's invariants, checked one by one. Slow, plain and independent of the kernels."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kaiseki.core.decision import I64, Bool
from kaiseki.memory.buddy import BUDDIES
from kaiseki.memory.layout import (
    AGAIN,
    CACHED,
    COMMITTED,
    COUNT,
    FENCE,
    FREE,
    GHOSTS,
    HEAD,
    HOLDS,
    IDLE,
    IDLE_HEAD,
    INDEXED,
    KIDS,
    LANE,
    LEFT,
    LENGTH,
    LIMBO,
    LIVE,
    LONG,
    NEXT,
    OFFSET,
    ONCE,
    ORDER,
    PAGE,
    PARENT,
    PIN,
    PINS,
    PLACE,
    PRIVATE,
    QUEUE,
    QUEUED,
    RETIRED,
    ROOT,
    ROW,
    ROWS,
    RUNS,
    SINGLES,
    SIZES,
    SLOT,
    STACK,
    TAIL,
    UNINDEXED,
    WAITING,
    WAITING_HEAD,
    State,
)


def check(s: State) -> None:
    """Assert every invariant of a pool.

    Raises:
        AssertionError: naming the first that does not hold.
    """
    _check_owners(s)
    _check_states(s)
    _check_index(s)
    _check_lanes(s)


def _linked(head: int, links: I64, limit: int) -> list[int]:
    """Members of a linked list that starts at `head`, at most `limit` of them."""
    members: list[int] = []
    while head >= 0 and len(members) < limit:
        members.append(head)
        head = int(links[head])
    return members


def _tables(s: State, which: Bool) -> list[tuple[int, list[int]]]:
    """(lane, its blocks) of the lanes in `which`, bool[L]."""
    return [
        (lane, s.tables[lane, : s.lanes[lane, LENGTH]].tolist()) for lane in np.flatnonzero(which).tolist()
    ]


def _check_owners(s: State) -> None:
    """Rows and holds of a block are exactly the lanes' table entries."""
    for column, name, which in (
        (ROWS, "rows", s.lanes[:, ROW] >= 0),
        (HOLDS, "holds", s.lanes[:, ROW] != -1),
    ):
        counts: Counter[int] = Counter()
        for lane, blocks in _tables(s, which):
            assert len(set(blocks)) == len(blocks), f"lane {lane} has a block twice"
            counts.update(blocks)
        for block, count in enumerate(s.blocks[:, column].tolist()):
            assert count == counts[block], f"block {block} counts {count} {name}, has {counts[block]}"


def _check_states(s: State) -> None:
    """Every block is in one state, and the counters and lists agree."""
    rows, holds = s.blocks[:, ROWS], s.blocks[:, HOLDS]
    indexed = s.blocks[:, PARENT] != UNINDEXED
    cached = np.flatnonzero((holds == 0) & indexed).tolist()
    unowned = np.flatnonzero((holds == 0) & ~indexed).tolist()
    _check_free(s, unowned)
    for name, counter, found in (
        ("free", FREE, len(unowned)),
        ("cached", CACHED, len(cached)),
        ("live", LIVE, int((rows > 0).sum())),
        ("limbo", LIMBO, int(((rows == 0) & (holds > 0)).sum())),
    ):
        have = int(s.counters[counter])
        assert have == found, f"{have} {name} blocks counted, {found} found"
    assert len(rows) == sum(int(s.counters[c]) for c in (FREE, CACHED, LIVE, LIMBO)), "blocks leaked"
    _check_queue(s, cached)


def _check_free(s: State, unowned: list[int]) -> None:
    """The runs hold the unowned blocks once each, are aligned, and as long as they can be."""
    found: list[int] = []
    for order in range(SIZES):
        size = BUDDIES**order
        heads = s.free[: s.counters[SINGLES + order], STACK + order].tolist()
        assert all(head % size == 0 for head in heads), f"a run of {size} blocks is not aligned"
        assert sorted(heads) == np.flatnonzero(s.free[:, ORDER] == order).tolist(), (
            f"runs of {size} are wrong"
        )
        assert [s.free[head, PLACE] for head in heads] == list(range(len(heads))), "a run is misplaced"
        found += [block for head in heads for block in range(head, head + size)]
        groups = Counter(head // (size * BUDDIES) for head in heads)
        apart = order == SIZES - 1 or not s.counters[RUNS] or max(groups.values(), default=0) < BUDDIES
        assert apart, f"{BUDDIES} runs of {size} blocks side by side are not one"
    assert sorted(found) == unowned, "the runs do not hold exactly the unowned blocks"


def _check_queue(s: State, cached: list[int]) -> None:
    """The rings hold the cached blocks once each, children before parents; ghosts are counted."""
    left = s.ghosts[:, :, LEFT]
    for queue in (ONCE, AGAIN):
        assert s.counters[GHOSTS + queue] == (left == queue + 1).sum(), "ghosts are counted wrong"
    place: dict[int, tuple[int, int]] = {}
    for queue, ring in enumerate(s.queues):
        head, tail = int(s.counters[HEAD + queue]), int(s.counters[TAIL + queue])
        assert tail - head <= ring.size, "an eviction queue is longer than its ring"
        spots = [at % ring.size for at in range(head, tail)]
        in_it = (s.blocks[ring, QUEUED] == np.arange(ring.size)) & (s.blocks[ring, QUEUE] == queue)
        order = [int(ring[at]) for at in spots if in_it[at]]
        assert len(order) == s.counters[LONG + queue], "an eviction queue is not as long as it says"
        place |= {block: (queue, at) for at, block in enumerate(order)}
    assert sorted(place) == cached, "the eviction queues do not hold exactly the cached blocks"
    assert (np.delete(s.blocks[:, QUEUED], cached) == -1).all(), "a block that is not cached is queued"
    for block in np.flatnonzero(s.blocks[:, PARENT] >= 0).tolist():
        parent, pinned = int(s.blocks[block, PARENT]), s.blocks[block, PIN] == s.counters[PINS]
        assert s.blocks[parent, QUEUE] >= s.blocks[block, QUEUE], f"block {block} is in a later queue"
        assert not pinned or s.blocks[parent, PIN] == s.counters[PINS], f"the parent of {block} is not pinned"
        if block in place and parent in place:
            assert place[parent] > place[block], f"block {block} is evicted after its parent"


def _check_index(s: State) -> None:
    """Hash table, digests, parents and child counts agree; ancestors of live blocks are live."""
    used = np.flatnonzero(s.slots[:, 0] >= 0).tolist()
    indexed = np.flatnonzero(s.blocks[:, PARENT] != UNINDEXED).tolist()
    assert sorted(s.slots[used, 0].tolist()) == indexed, "the hash table does not hold the indexed blocks"
    names = [s.digests[block].tobytes() for block in indexed]
    assert len(set(names)) == len(names), "a digest is indexed twice"
    mask = len(s.slots) - 1
    for slot in used:
        block, tag = s.slots[slot].tolist()
        assert s.blocks[block, SLOT] == slot and s.digests[block, 0] == tag, f"slot {slot} is wrong"
        run = ((tag & mask) + np.arange(((slot - tag) & mask) + 1)) & mask
        assert (s.slots[run, 0] >= 0).all(), f"slot {slot} cannot be reached from its home {tag & mask}"
    kids: Counter[int] = Counter()
    for block in indexed:
        parent = int(s.blocks[block, PARENT])
        if parent != ROOT:
            kids[parent] += 1
            assert s.blocks[parent, PARENT] != UNINDEXED, f"block {block} lost its parent {parent}"
            live = s.blocks[block, ROWS] == 0 or s.blocks[parent, ROWS] > 0
            assert live, f"block {block} is live, its parent {parent} is not"
    for block, count in enumerate(s.blocks[:, KIDS].tolist()):
        assert count == kids[block], f"block {block} counts {count} children, has {kids[block]}"


def _check_lanes(s: State) -> None:
    """Rows and lanes point at each other; what a lane says about its blocks is true."""
    limit = len(s.lanes) + 1
    idle = _linked(int(s.counters[IDLE_HEAD]), s.lanes[:, NEXT], limit)
    assert sorted(idle) == np.flatnonzero(s.lanes[:, ROW] == -1).tolist(), "list of idle lanes is wrong"
    assert len(idle) == s.counters[IDLE], "number of idle lanes is wrong"
    waiting = _linked(int(s.counters[WAITING_HEAD]), s.lanes[:, NEXT], limit)
    assert sorted(waiting) == np.flatnonzero(s.lanes[:, ROW] == WAITING).tolist(), (
        "list of waiting lanes is wrong"
    )
    assert (s.lanes[waiting, FENCE] > s.counters[RETIRED]).all(), "a lane waits for a retired slot"
    used = _tables(s, s.lanes[:, ROW] >= 0)
    rows = np.flatnonzero(s.requests[:, LANE] >= 0).tolist()
    owners = {int(s.requests[row, LANE]): row for row in rows}
    assert owners == {lane: int(s.lanes[lane, ROW]) for lane, _ in used}, "rows and lanes disagree"
    for lane, blocks in used:
        _check_lane(s, lane, blocks)


def _check_lane(s: State, lane: int, blocks: list[int]) -> None:
    """What one lane says about its blocks is true."""
    page = int(s.counters[PAGE])
    fields = s.lanes[lane]
    assert fields[COMMITTED] <= len(blocks) * page, f"lane {lane} committed more than it holds"
    for block in blocks[-(-int(fields[PRIVATE]) // page) :]:
        own = s.blocks[block, ROWS] == 1 and s.blocks[block, PARENT] == UNINDEXED
        assert own, f"lane {lane} takes block {block} for its own"
    offset, count = s.requests[fields[ROW], [OFFSET, COUNT]].tolist()
    assert fields[INDEXED] <= min(count, len(blocks)), f"lane {lane} indexed more than it has"
    for at, block in enumerate(blocks):
        parent = int(s.blocks[block, PARENT])
        if parent != UNINDEXED:
            assert parent == (blocks[at - 1] if at else ROOT), f"block {block} has a foreign parent"
        if at < fields[INDEXED]:
            same = np.array_equal(s.digests[block], s.chain[offset + at])
            assert parent != UNINDEXED and same, f"block {block} is not indexed under its digest"
