"""Matching chunks to cards and placing requests on replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.core import matching
from kaiseki.core.matching import assign
from kaiseki.core.placing import place

S = 1_000_000_000
KERNELS = [name for name in vars(matching) if hasattr(getattr(matching, name), "py_func")]


@dataclass
class Case:
    value: np.ndarray
    time: np.ndarray
    kv: np.ndarray
    room_time: np.ndarray
    room_kv: np.ndarray
    sticky: np.ndarray

    def assign(self, **more: Any) -> np.ndarray:
        return assign(self.value, self.time, self.kv, self.room_time, self.room_kv, self.sticky, **more)

    def rows(self, order: np.ndarray) -> Case:
        rooms = (self.room_time, self.room_kv)
        return Case(self.value[order], self.time[order], self.kv[order], *rooms, self.sticky[order])

    def worth(self, out: np.ndarray) -> float:
        free = np.flatnonzero((out >= 0) & (self.sticky < 0))
        return float(self.value[free, out[free]].sum())

    def left(self, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        held = out[:, None] == np.arange(self.room_time.size)
        return self.room_time - (self.time * held).sum(0), self.room_kv - (self.kv * held).sum(0)


@st.composite
def cases(draw: st.DrawFn, most: int = 24, ties: bool = True) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, m = draw(st.integers(1, most)), draw(st.integers(1, 4))
    value = rng.integers(-1, 6, (n, m)).astype(float) if ties else rng.lognormal(0, 1, (n, m))
    time, kv = rng.integers(0, 50, (n, m)).astype(float), rng.integers(0, 50, (n, m)).astype(float)
    fits = draw(st.floats(0.0, 1.2))
    room_time, room_kv = np.floor(time.sum(0) * fits / m), np.floor(kv.sum(0) * fits / m)
    running = draw(st.sampled_from([0.0, 0.2]))
    sticky = np.where(rng.random(n) < running, rng.integers(0, m, n), -1).astype(np.int32)
    return Case(value, time, kv, room_time, room_kv, sticky)


def plain_greedy(case: Case) -> np.ndarray:
    """Density greedy, written for reading: each where it is densest among the cards that it fits."""
    out = case.sticky.copy()
    left_time, left_kv = case.left(out)
    whole = np.maximum(left_time, 1), np.maximum(left_kv, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        density = case.value / (case.time / whole[0] + case.kv / whole[1])
    allowed = (case.value > 0) & (case.time <= left_time) & (case.kv <= left_kv)
    density = np.where(allowed, density, 0.0)
    for i in np.argsort(-density.max(1), kind="stable"):
        fits = allowed[i] & (case.time[i] <= left_time) & (case.kv[i] <= left_kv)
        if out[i] >= 0 or not fits.any():
            continue
        j = np.lexsort((-(left_time / whole[0] + left_kv / whole[1]), -np.where(fits, density[i], -1.0)))[0]
        out[i] = j
        left_time[j] -= case.time[i, j]
        left_kv[j] -= case.kv[i, j]
    return out


@given(cases())
def test_capacities_hold_and_what_runs_stays(case: Case) -> None:
    out = case.assign()
    assert out.dtype == np.int32
    assert set(out.tolist()) <= {-1, *range(case.room_time.size)}
    runs = case.sticky >= 0
    assert (out[runs] == case.sticky[runs]).all()
    placed = np.flatnonzero((out >= 0) & ~runs)
    assert (case.value[placed, out[placed]] > 0).all()
    for left in case.left(out):
        # What runs may overfill a card by itself; then nothing is added.
        over = left < 0
        assert not np.isin(out[placed], np.flatnonzero(over)).any()


@given(cases(), st.sampled_from([0, 10**9]))
def test_never_worse_than_the_plain_greedy(case: Case, effort: int) -> None:
    assert case.worth(case.assign(effort=effort)) >= case.worth(plain_greedy(case)) - 1e-9


@given(cases())
def test_nothing_waits_that_would_still_fit(case: Case) -> None:
    out = case.assign()
    left_time, left_kv = case.left(out)
    fits = (case.value > 0) & (case.time <= left_time) & (case.kv <= left_kv)
    assert not (fits.any(1) & (out < 0)).any()


@given(cases(ties=False), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter_without_ties(case: Case, random: Any) -> None:
    order = np.array(random.sample(range(case.sticky.size), case.sticky.size))
    np.testing.assert_array_equal(case.rows(order).assign(), case.assign()[order])


def test_alike_the_earlier_goes_first_and_to_the_emptier_card() -> None:
    alike = np.ones((5, 2))
    case = Case(alike, alike * 4, alike * 4, np.full(2, 8.0), np.full(2, 8.0), np.full(5, -1, np.int32))
    assert case.assign().tolist() == [0, 1, 0, 1, -1]


@pytest.mark.skipif(not KERNELS, reason="nothing is compiled in this run")
@given(cases())
def test_compiled_equals_uncompiled(case: Case) -> None:
    compiled = case.assign()
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setattr(matching, name, getattr(matching, name).py_func)
        plain = matching.assign(case.value, case.time, case.kv, case.room_time, case.room_kv, case.sticky)
    np.testing.assert_array_equal(compiled, plain)


def test_a_gap_is_filled_by_two_small_ones() -> None:
    """The densest takes so much that the two that fill the card exactly don't fit any more."""
    need = np.array([[6.0], [5.0], [5.0]])
    case = Case(
        need * [[1.2], [1.0], [1.0]], need, need, np.array([10.0]), np.array([10.0]), np.full(3, -1, np.int32)
    )
    assert plain_greedy(case).tolist() == [0, -1, -1]
    assert case.assign(effort=0).tolist() == [-1, 0, 0]


def test_a_large_one_displaces_small_dense_ones() -> None:
    need = np.array([[1.0], [1.0], [10.0]])
    case = Case(
        np.array([[2.0], [2.0], [9.0]]),
        need,
        need,
        np.array([10.0]),
        np.array([10.0]),
        np.full(3, -1, np.int32),
    )
    assert plain_greedy(case).tolist() == [0, 0, -1]
    assert case.assign(effort=0).tolist() == [-1, -1, 0]


def placed(
    uncached: list[list[int]],
    *,
    log_urgency: list[float] | None = None,
    blocks: list[list[int]] | None = None,
    load_s: list[float] | None = None,
    free: int = 1000,
    horizon_s: float = 1.0,
) -> list[int]:
    tokens = np.array(uncached, np.int32)
    n, m = tokens.shape
    return place(
        np.array(log_urgency or [0.0] * n),
        tokens,
        np.array(blocks, np.int32) if blocks else tokens // 16,
        np.full(m, S / 1000),
        np.array(load_s or [0.0] * m) * S,
        np.full(m, free, np.int64),
        horizon_ns=int(horizon_s * S),
        tau_ns=1.0 * S,
    ).tolist()


def test_a_request_goes_to_its_prefix_until_the_load_there_outweighs_it() -> None:
    assert placed([[500, 100]]) == [1]
    assert placed([[500, 100]], load_s=[0.0, 0.3]) == [1]
    assert placed([[200, 100]], load_s=[0.0, 0.9]) == [0]


def test_the_less_loaded_replica_gets_it() -> None:
    assert placed([[100, 100, 100]], load_s=[0.3, 0.1, 0.2]) == [1]


def test_the_more_urgent_go_first_and_the_rest_wait() -> None:
    assert placed([[800], [800], [150]], log_urgency=[0.0, 1.0, -2.0]) == [-1, 0, 0]
    # However far apart their deadlines are.
    assert placed([[800], [100]], log_urgency=[0.0, -1e6]) == [0, 0]


def test_blocks_bind_too() -> None:
    assert placed([[10, 10]] * 3, blocks=[[6, 6]] * 3, free=10) == [0, 1, -1]


def test_work_beyond_the_horizon_goes_to_an_idle_replica_only() -> None:
    assert placed([[5000, 5000]], load_s=[0.1, 0.0]) == [1]
    assert placed([[5000, 5000]], load_s=[0.1, 0.1]) == [-1]


def test_nobody_and_nowhere() -> None:
    assert placed(np.zeros((0, 2), int)) == []
    assert placed(np.zeros((2, 0), int)) == [-1, -1]
