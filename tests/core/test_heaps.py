"""Queues of rows against sorted lists."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.core.heaps import NIL, HeapSet

ROWS, QUEUES = 14, 3
Entry = tuple[float, int, int]  # key, seq, row


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def audit(heaps: HeapSet, model: dict[int, tuple[int, float, int]]) -> None:
    """Order, links, ranks and sizes; the way down the right is never longer than log2 of the queue."""
    nodes, seen = heaps.nodes, set[int]()
    for queue, root in enumerate(heaps.roots.tolist()):
        stack = [root] if root != NIL else []
        assert root == NIL or nodes["parent"][root] == NIL
        here = 0
        while stack:
            row = stack.pop()
            assert row not in seen and nodes["queue"][row] == queue
            seen.add(row)
            here += 1
            ranks = []
            for child in (int(nodes["left"][row]), int(nodes["right"][row])):
                ranks.append(int(nodes["rank"][child]) if child != NIL else 0)
                if child != NIL:
                    assert nodes["parent"][child] == row
                    assert nodes[["key", "seq"]][row].item() < nodes[["key", "seq"]][child].item()
                    stack.append(child)
            assert ranks[0] >= ranks[1] and nodes["rank"][row] == ranks[1] + 1
        assert here == heaps.sizes[queue] == sum(q == queue for q, _, _ in model.values())
        if root != NIL:
            assert nodes["rank"][root] <= math.log2(here + 1)
    assert seen == set(model) and len(heaps) == len(model)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("push", "push", "push", "remove", "pop", "due", "back")),
            st.integers(0, ROWS - 1),
            st.integers(0, QUEUES - 1),
            st.sampled_from((0.0, 1.0, 2.5, -3.0, 7.0)),
        ),
        max_size=80,
    )
)
def test_queues_behave_like_sorted_lists(
    steps: list[tuple[str, int, int, float]],
) -> None:
    heaps = HeapSet(QUEUES, ROWS)
    model: dict[int, tuple[int, float, int]] = {}
    popped: dict[int, tuple[int, float, int]] = {}
    for seq, (what, row, queue, key) in enumerate(steps):
        if what == "push" and row not in model:
            heaps.push(i32(row), i32(queue), np.array([key]), np.array([seq]))
            model[row] = (queue, key, seq)
            popped.pop(row, None)
        elif what == "remove":
            heaps.remove(i32(row))
            model.pop(row, None)
        elif what == "pop":
            quota = [row % 3, queue, 2]
            limit = row % 5
            expected: list[int] = []
            left = list(quota)
            for r, (q, _, _) in sorted(model.items(), key=lambda item: item[1][1:]):
                if len(expected) < limit and left[q] > 0:
                    left[q] -= 1
                    expected.append(r)
            assert heaps.pop(limit, i32(*quota)).tolist() == expected
            popped = {r: model.pop(r) for r in expected}
        elif what == "due":
            ordered = sorted((m[1:], r) for r, m in model.items() if m[0] == 0)
            expected = [r for (k, _), r in ordered if k < key][: row % 4]
            assert heaps.pop_due(key, row % 4).tolist() == expected
            for r in expected:
                del model[r]
        elif what == "back" and popped:
            rows = [r for r in popped if r not in model]
            heaps.push_back(i32(*rows), i32(*(popped[r][0] for r in rows)))
            model.update({r: popped[r] for r in rows})
            popped = {}
        audit(heaps, model)


def test_sorted_and_reversed_input_stays_shallow_on_the_merge_path() -> None:
    n = 3000
    for keys in (np.arange(n, dtype=float), -np.arange(n, dtype=float), np.zeros(n)):
        heaps = HeapSet(1, n)
        rows = np.arange(n, dtype=np.int32)
        heaps.push(rows, np.zeros(n, np.int32), keys, np.arange(n))
        audit(heaps, {r: (0, float(keys[r]), r) for r in range(n)})
        heaps.remove(rows[::3].copy())
        left = [r for r in range(n) if r % 3]
        audit(heaps, {r: (0, float(keys[r]), r) for r in left})
        assert heaps.pop(n, i32(n)).tolist() == sorted(left, key=lambda r: (keys[r], r))


def test_rows_and_queues_are_added_without_disturbing_those_there() -> None:
    heaps = HeapSet(1, 2)
    heaps.push(i32(1), i32(0), np.array([5.0]), np.array([0]))
    heaps.ensure_rows(100)
    heaps.ensure_queues(4)
    heaps.push(i32(99), i32(3), np.array([1.0]), np.array([1]))
    assert 99 in heaps and 1 in heaps and 50 not in heaps
    assert heaps.pop(5, np.full(4, 9, np.int32)).tolist() == [99, 1]
    heaps.ensure_rows(10)
    assert len(heaps) == 0 and heaps.key.size == 100
