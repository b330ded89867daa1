"""Batches: prefix blocks, cutting streams, and changing their shape."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.work.streams import column, same

from kaiseki.core.requests import NEVER_NS
from kaiseki.work.batches import BATCH_ROWS, NONE, Batch, Blocks, take
from kaiseki.work.catalogue import chat_sessions
from kaiseki.work.shaping import Shape, shrink

LENGTHS = st.lists(st.tuples(st.integers(1, 10_000_000), st.integers(1, 10_000_000)), min_size=1, max_size=30)


def batch(*requests: tuple[int, int, list[int]]) -> Batch:
    prompts, outputs, ids = zip(*requests, strict=True)
    return Batch.of(0, range(len(requests)), prompts, outputs, blocks=Blocks.of(ids))


def test_a_new_batch_is_assigned_to_nobody() -> None:
    one = Batch.of(5, [1, 2], [3, 4], [5, 6])
    assert (one.first, len(one)) == (5, 2)
    assert (one.arrival_ns.dtype, one.prompt_tokens.dtype, one.class_index.dtype) == (
        np.int64,
        np.int32,
        np.int16,
    )
    assert one.ttft_ns.tolist() == [NEVER_NS] * 2
    assert one.follow.parent.tolist() == one.follow.session.tolist() == [NONE] * 2
    assert one.blocks.row(1).tolist() == []


def test_blocks_by_row_and_slice() -> None:
    blocks = Blocks.of([[1, 2], [], [3]])
    assert [blocks.row(i).tolist() for i in range(3)] == [[1, 2], [], [3]]
    rest = blocks.at(slice(1, 3))
    assert [rest.row(i).tolist() for i in range(2)] == [[], [3]]
    assert same(Blocks.of([]), Blocks.unknown(0))


def test_blocks_are_cut_with_their_prompt() -> None:
    blocks = Blocks.of([[1, 2, 3], [], [4, 5]]).cut(np.array([513, 9, 512], np.int32))
    assert [blocks.row(i).tolist() for i in range(3)] == [[1, 2], [], [4]]


@given(LENGTHS, st.integers(2, 20_000_000))
def test_shrinking_keeps_the_proportion(lengths: list[tuple[int, int]], most: int) -> None:
    prompts, outputs = np.array(lengths).T
    small = shrink(Batch.of(0, np.arange(len(lengths)), prompts, outputs), most)
    total = prompts + outputs
    large = total > most
    p, o = small.prompt_tokens.astype(np.int64), small.output_tokens.astype(np.int64)
    assert (p >= 1).all() and (o >= 1).all()
    assert np.array_equal((p + o)[large], np.full(large.sum(), most))
    assert np.array_equal(p[~large], prompts[~large]) and np.array_equal(o[~large], outputs[~large])
    exact = prompts[large] * most / total[large]
    assert (np.abs(p[large] - exact) <= 1).all()


def test_shrinking_cuts_the_blocks() -> None:
    small = shrink(batch((2000, 1000, [1, 2, 3, 4]), (600, 10, [1, 5])), 1500)
    assert small.prompt_tokens.tolist() == [1000, 600]
    assert [small.blocks.row(i).tolist() for i in range(2)] == [[1, 2], [1, 5]]


def test_taking_cuts_inside_a_batch() -> None:
    stream = list(take(chat_sessions().stream(3), BATCH_ROWS + 7))
    assert [len(one) for one in stream] == [BATCH_ROWS, 7]
    whole = list(islice(chat_sessions().stream(3), 2))
    assert same(stream[0], whole[0])
    assert same(stream[1], whole[1].head(7))
    assert [len(one) for one in take(iter(whole), BATCH_ROWS)] == [BATCH_ROWS]


def test_a_faster_clock_keeps_the_order_of_sessions() -> None:
    plain = list(take(chat_sessions().stream(1), 5000))
    fast = list(Shape(rate_scale=2.5).apply(iter(plain)))
    assert np.allclose(column(fast, "arrival_ns") * 2.5, column(plain, "arrival_ns"), atol=3)
    follow = fast[0].follow
    children = np.flatnonzero(follow.parent != NONE)
    earliest = fast[0].arrival_ns[follow.parent[children]] + follow.delay_ns[children]
    assert np.allclose(fast[0].arrival_ns[children], earliest, atol=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate_scale": 0},
        {"rate_scale": float("nan")},
        {"rate_scale": float("inf")},
        {"requests": 0},
        {"max_total_tokens": 1},
    ],
)
def test_shapes_out_of_range(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Shape(**wrong)
