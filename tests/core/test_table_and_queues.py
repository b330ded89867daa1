"""The request table recycles rows cleanly; the waiting queues keep two orders over the same rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.core.queues import Waiting
from kaiseki.core.table import ROW, RequestTable, State, View


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@given(st.lists(st.tuples(st.sampled_from(("take", "run", "stop", "recycle")), st.integers(0, 30))))
def test_running_rows_are_those_in_state_running(steps: list[tuple[str, int]]) -> None:
    table = RequestTable(2)
    taken: list[int] = []
    for what, pick in steps:
        if what == "take":
            row = table.take()
            assert row not in taken and table.state[row] == State.FREE
            taken.append(row)
        elif taken:
            row = taken[pick % len(taken)]
            running = bool(table.state[row] == State.RUNNING)
            if what == "run" and not running:
                table.start_running(i32(row))
            elif what == "stop" and running:
                table.stop_running(i32(row), State.WAITING)
            elif what == "recycle" and not running:
                table.recycle(i32(row))
                taken.remove(row)
        assert sorted(table.running_rows().tolist()) == np.flatnonzero(table.state == State.RUNNING).tolist()
        assert table.open_rows == len(taken)


def test_a_recycled_row_is_as_new_but_for_its_epoch() -> None:
    table = RequestTable(1)
    row = table.take()
    new = table.records[row].item()
    for name in ROW.names or ():
        if name not in ("state", "epoch"):
            getattr(table, name)[row] = 1
    before = int(table.epoch[row])
    table.recycle(i32(row))
    again = table.take()
    assert again == row and table.epoch[row] > before
    table.epoch[row] = 0
    assert table.records[row].item() == new


def test_growing_keeps_what_was_there() -> None:
    table = RequestTable(1)
    first = table.take()
    table.prompt[first] = 7
    table.start_running(i32(first))
    rows = [table.take() for _ in range(50)]
    assert table.prompt[first] == 7 and first not in rows and len(set(rows)) == 50
    assert table.running_rows().tolist() == [first]


def test_a_view_reads_columns_of_its_rows() -> None:
    table = RequestTable(4)
    table.prompt[:] = [1, 2, 3, 4]
    table.outputs[:] = 1
    table.min_tokens[:] = [0, 4, 0, 8]
    view = View(table, i32(3, 1), i32(10, 0), 100.0, 2.0, 7.0, 3.0)
    assert view.prompt.tolist() == [4, 2]
    assert view.lone_ns.tolist() == [120.0, 100.0]
    assert view.paced_ns.tolist() == [10 * 3 + 6 * 7, 2 * 7]


def waiting_rows(prompts: list[int], tenants: list[int]) -> tuple[RequestTable, Waiting, np.ndarray]:
    table = RequestTable(1)
    waiting = Waiting(table)
    rows = i32(*(table.take() for _ in prompts))
    table.prompt[rows] = prompts
    table.tenant[rows] = tenants
    table.seq[rows] = np.arange(rows.size)
    table.arrival_ns[rows] = np.arange(rows.size) * 1000
    return table, waiting, rows


def test_tokens_and_counts_follow_what_waits() -> None:
    _, waiting, rows = waiting_rows([10, 20, 30], [0, 1, 1])
    waiting.add(rows, np.zeros(3), np.array([5.0, np.inf, 7.0]), i32(10, 20, 30))
    assert (len(waiting), waiting.tokens, waiting.counts().tolist()) == (3, 60, [1, 2])
    waiting.take(rows[1:2])
    assert (len(waiting), waiting.tokens, waiting.count(1), waiting.count(9)) == (2, 40, 1, 0)
    assert rows[1] not in waiting and rows[0] in waiting


def test_a_look_takes_the_best_within_each_tenants_share_and_puts_them_back() -> None:
    _, waiting, rows = waiting_rows([1] * 5, [0, 0, 0, 1, 1])
    waiting.add(rows, np.array([1.0, 2.0, 3.0, 9.0, 8.0]), np.full(5, np.inf), i32(1, 100, 1, 1, 5000))
    seen = waiting.peek(4, i32(2, 2))
    assert seen.tolist() == rows[[0, 1, 4, 3]].tolist()
    waiting.put_back(seen)
    assert waiting.peek(9, i32(9, 9)).tolist() == rows[[0, 1, 2, 4, 3]].tolist()


def test_only_dated_rows_fall_due_and_they_stay_in_their_queue() -> None:
    _, waiting, rows = waiting_rows([1, 1, 1], [0, 0, 0])
    waiting.add(rows, np.zeros(3), np.array([50.0, np.inf, 20.0]), i32(1, 1, 1))
    assert waiting.due(20, 9).size == 0
    assert waiting.due(51, 1).tolist() == [rows[2]]
    assert waiting.due(51, 9).tolist() == [rows[0]]
    assert len(waiting) == 3
    waiting.watch(rows[:1], np.array([90.0]))
    assert waiting.due(91, 9).tolist() == [rows[0]]


def test_demoted_rows_come_after_all_others_of_their_tenant_by_arrival() -> None:
    table, waiting, rows = waiting_rows([1, 1, 1], [0, 0, 0])
    table.demoted[rows[:2]] = True
    waiting.add(rows[::-1].copy(), np.array([1e12, -5.0, -7.0]), np.zeros(3), i32(1, 1, 1))
    assert waiting.peek(9, i32(9, 9)).tolist() == rows[[2, 0, 1]].tolist()
    assert waiting.due(10**9, 9).tolist() == [rows[2]], "demoted ones have nothing left to miss"
