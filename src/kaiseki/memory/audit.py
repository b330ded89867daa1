"""The pool's invariants, checked one by one. Slow, plain and independent of the kernels."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kaiseki.memory.layout import (
    CACHED,
    CAPACITY,
    COMMITTED,
    COUNT,
    FENCE,
    FREE,
    FREE_HEAD,
    HEAP_AT,
    HEAP_SIZE,
    IDLE,
    IDLE_HEAD,
    INDEXED,
    KIDS,
    LANE,
    LENGTH,
    LIMBO,
    LIMBO_HEAD,
    LISTED,
    LIVE,
    NEXT,
    NEXT_IDLE,
    OFFSET,
    PAGE,
    PARENT,
    PRIVATE,
    REFS,
    RETIRED,
    ROOT,
    ROW,
    STAMP,
    UNINDEXED,
    State,
)


def check(s: State) -> None:
    """Assert every invariant of a pool.

    Raises:
        AssertionError: naming the first that does not hold.
    """
    _check_owners(s)
    _check_states(s)
    _check_heap(s)
    _check_index(s)
    _check_lanes(s)


def _linked(head: int, links: np.ndarray, limit: int) -> list[int]:
    """Members of a linked list that starts at `head`, at most `limit` of them."""
    members: list[int] = []
    while head >= 0 and len(members) < limit:
        members.append(head)
        head = int(links[head])
    return members


def _held(s: State) -> list[tuple[int, list[int]]]:
    """(lane, its blocks) of every lane in use."""
    return [
        (lane, s.tables[lane, : s.lanes[lane, LENGTH]].tolist())
        for lane in np.flatnonzero(s.lanes[:, ROW] >= 0).tolist()
    ]


def _check_owners(s: State) -> None:
    """References are exactly the lanes' table entries."""
    refs: Counter[int] = Counter()
    for lane, blocks in _held(s):
        assert len(set(blocks)) == len(blocks), f"lane {lane} has a block twice"
        refs.update(blocks)
    for block, count in enumerate(s.blocks[:, REFS].tolist()):
        assert count == refs[block], f"block {block} has {count} references, {refs[block]} lanes hold it"


def _check_states(s: State) -> None:
    """Every block is in one state, and the counters and lists agree."""
    refs, listed = s.blocks[:, REFS], s.blocks[:, LISTED]
    indexed = s.blocks[:, PARENT] != UNINDEXED
    at_rest = (refs == 0) & (listed == 0)
    total = len(refs)
    unowned = _linked(int(s.counters[FREE_HEAD]), s.blocks[:, NEXT], int(s.counters[FREE]))
    assert sorted(unowned) == np.flatnonzero(at_rest & ~indexed).tolist(), "list of unowned blocks is wrong"
    waiting = _linked(int(s.counters[LIMBO_HEAD]), s.blocks[:, NEXT], total + 1)
    assert sorted(waiting) == np.flatnonzero(listed).tolist(), "list of fenced blocks is wrong"
    assert (s.blocks[waiting, FENCE] > s.counters[RETIRED]).all(), "a block waits for a retired slot"
    for name, counter, which in (
        ("free", FREE, at_rest & ~indexed),
        ("cached", CACHED, at_rest & indexed),
        ("live", LIVE, refs > 0),
        ("limbo", LIMBO, (refs == 0) & (listed == 1)),
    ):
        have = int(s.counters[counter])
        assert have == int(which.sum()), f"{have} {name} blocks counted, {int(which.sum())} found"
    assert total == sum(int(s.counters[c]) for c in (FREE, CACHED, LIVE, LIMBO)), "blocks leaked"


def _check_heap(s: State) -> None:
    """The heap holds the cached leaves, each where it says it is, oldest on top."""
    size = int(s.counters[HEAP_SIZE])
    members = s.heap[:size].tolist()
    b = s.blocks
    leaf = (b[:, REFS] == 0) & (b[:, LISTED] == 0) & (b[:, PARENT] != UNINDEXED) & (b[:, KIDS] == 0)
    assert sorted(members) == np.flatnonzero(leaf).tolist(), "the heap is not the set of cached leaves"
    for at, block in enumerate(members):
        assert b[block, HEAP_AT] == at, f"block {block} is not where it thinks in the heap"
        assert b[members[(at - 1) // 2], STAMP] <= b[block, STAMP] or at == 0, "heap order is broken"
    assert (b[~leaf, HEAP_AT] == -1).all(), "a block outside the heap has a place in it"


def _check_index(s: State) -> None:
    """Hash table, digests, parents and child counts agree; ancestors of held blocks are held."""
    entries = s.slots[s.slots >= 0].tolist()
    indexed = np.flatnonzero(s.blocks[:, PARENT] != UNINDEXED).tolist()
    assert sorted(entries) == indexed, "the hash table does not hold exactly the indexed blocks"
    names = [s.digests[block].tobytes() for block in indexed]
    assert len(set(names)) == len(names), "a digest is indexed twice"
    mask = s.slots.size - 1
    for slot in np.flatnonzero(s.slots >= 0).tolist():
        home = int(s.digests[s.slots[slot], 0]) & mask
        run = (home + np.arange(((slot - home) & mask) + 1)) & mask
        assert (s.slots[run] >= 0).all(), f"slot {slot} cannot be reached from its home {home}"
    kids: Counter[int] = Counter()
    for block in indexed:
        parent = int(s.blocks[block, PARENT])
        if parent != ROOT:
            kids[parent] += 1
            assert s.blocks[parent, PARENT] != UNINDEXED, f"block {block} lost its parent {parent}"
            if s.blocks[block, REFS] > 0:
                assert s.blocks[parent, REFS] > 0, f"block {block} is held, its parent {parent} is not"
    for block, count in enumerate(s.blocks[:, KIDS].tolist()):
        assert count == kids[block], f"block {block} counts {count} children, has {kids[block]}"


def _check_lanes(s: State) -> None:
    """Rows and lanes point at each other; what a lane says about its blocks is true."""
    idle = _linked(int(s.counters[IDLE_HEAD]), s.lanes[:, NEXT_IDLE], int(s.counters[IDLE]) + 1)
    assert sorted(idle) == np.flatnonzero(s.lanes[:, ROW] < 0).tolist(), "list of idle lanes is wrong"
    assert len(idle) == s.counters[IDLE], "number of idle lanes is wrong"
    owners = {lane: row for row, lane in enumerate(s.requests[:, LANE].tolist()) if lane >= 0}
    assert owners == {lane: int(s.lanes[lane, ROW]) for lane, _ in _held(s)}, "rows and lanes disagree"
    page = int(s.counters[PAGE])
    for lane, blocks in _held(s):
        fields = s.lanes[lane]
        assert fields[CAPACITY] == len(blocks) * page, f"lane {lane} has a wrong capacity"
        assert fields[COMMITTED] <= fields[CAPACITY], f"lane {lane} committed more than it holds"
        for block in blocks[-(-int(fields[PRIVATE]) // page) :]:
            own = s.blocks[block, REFS] == 1 and s.blocks[block, PARENT] == UNINDEXED
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
