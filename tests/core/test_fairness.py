"""Counters of service: who is charged, who is lifted, and by how much."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.core.fairness import Fairness
from kaiseki.core.lanes import LANES
from kaiseki.core.starting import recharge
from kaiseki.core.table import RequestTable


def charge(fairness: Fairness, tenants: np.ndarray, shares: np.ndarray, measured: float) -> np.ndarray:
    """A slot from its grants to its measurement. Returns what each request was charged."""
    table, rows = RequestTable(), np.arange(tenants.size, dtype=np.int32)
    np.add.at(fairness.counter, tenants, shares / fairness.weight[tenants])
    valid = np.ones(tenants.size, np.bool_)
    f, groups = fairness, (tenants * LANES).astype(np.int32)
    recharge(table.records, valid, rows, groups, shares, measured, f.counter, f.weight, f.lane_counter)
    fairness.observe_slot(measured)
    return table.service_ns[rows]


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(1e-3, 1e9)), min_size=1, max_size=9),
    st.floats(0.0, 1e9),
    st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3),
)
def test_a_slot_is_charged_in_full_and_once(
    parts: list[tuple[int, float]], measured: float, weights: list[float]
) -> None:
    fairness = Fairness(10)
    for name, weight in zip("abc", weights, strict=True):
        fairness.set_weight(name, weight)
    tenants, shares = i32(*(p[0] for p in parts)), np.array([p[1] for p in parts])
    split = charge(fairness, tenants, shares, measured)
    rounding = 1e-12 * shares.sum()  # what was predicted is put in first and taken out again
    assert np.isclose(split.sum(), measured)
    assert np.isclose((fairness.counter * fairness.weight).sum(), measured, atol=rounding)
    for tenant in range(3):
        charged = fairness.counter[tenant] * weights[tenant]
        assert np.isclose(charged, split[tenants == tenant].sum(), atol=rounding)


def test_weight_divides_the_charge() -> None:
    fairness = Fairness(10)
    fairness.set_weight("a", 3.0)
    b = fairness.tenant("b")
    charge(fairness, i32(0, b), np.array([1.0, 1.0]), 600.0)
    assert fairness.counter.tolist() == [100.0, 300.0]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_must_be_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        Fairness(1).set_weight("a", weight)


def test_who_returns_is_lifted_to_the_least_of_those_with_work() -> None:
    fairness = Fairness(10)
    a, b, c = (fairness.tenant(n) for n in "abc")
    fairness.opened(a)
    fairness.opened(b)
    charge(fairness, i32(a, b), np.array([1.0, 2.0]), 300.0)
    fairness.opened(c)
    assert fairness.counter[c] == 100.0
    charge(fairness, i32(c), np.array([1.0]), 900.0)
    fairness.closed(i32(c))
    fairness.opened(c)
    assert fairness.counter[c] == 1000.0, "time away pays nothing back"
    fairness.opened(c)
    fairness.closed(i32(c))
    charge(fairness, i32(a, b), np.array([1.0, 1.0]), 9000.0)
    fairness.opened(c)
    assert fairness.counter[c] == 1000.0, "it was never away"


def test_the_gap_counts_only_tenants_with_work() -> None:
    fairness = Fairness(10)
    a, b, idle = (fairness.tenant(n) for n in "abz")
    charge(fairness, i32(a, b, idle), np.array([1.0, 4.0, 95.0]), 100.0)
    assert fairness.gap_ns() == 0.0
    fairness.opened(a)
    assert fairness.gap_ns() == 0.0
    fairness.open_requests[b] = 1
    assert fairness.gap_ns() == 3.0


def test_the_lag_is_a_number_of_mean_slots() -> None:
    fairness = Fairness(10)
    fairness.tenant("a")
    assert fairness.lag_ns == 0.0
    for _ in range(50):
        charge(fairness, i32(0), np.array([1.0]), 7.0)
    assert np.isclose(fairness.lag_ns, 70.0)
