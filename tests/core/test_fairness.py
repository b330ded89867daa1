"""Counters of service: who is charged, who is lifted, and by how much."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.core.fairness import BLOCKED, SERVED, UNMET, Fairness, settle_books
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


def settle(fairness: Fairness, unmet: str = "", blocked: str = "", served: str = "") -> None:
    """A slot in which these tenants wanted more, lacked room, were served."""
    slot = np.zeros((3, fairness.counter.size), np.bool_)
    for kind, names in ((UNMET, unmet), (BLOCKED, blocked), (SERVED, served)):
        for name in names:
            slot[kind, fairness.tenant(name)] = True
    settle_books(fairness.counter, fairness.claims, slot, fairness.floor, fairness.counter.size)


def books(**counters: float) -> Fairness:
    fairness = Fairness(10)
    for name, counter in counters.items():
        fairness.opened(fairness.tenant(name))
        fairness.counter[fairness.tenant(name)] = counter
    return fairness


def test_who_comes_to_want_more_is_lifted_to_the_least_of_those_that_do() -> None:
    fairness = books(a=100.0, b=300.0, c=0.0)
    settle(fairness, unmet="ab", served="ab")
    assert fairness.comparable()[0].tolist() == [100.0, 300.0, 100.0], "as soon as it is compared"
    settle(fairness, unmet="abc")
    assert fairness.counter.tolist() == [100.0, 300.0, 100.0], "and for good once it has a claim"
    fairness.counter[:] += 50
    settle(fairness, unmet="ab")
    settle(fairness, unmet="abc")
    assert fairness.counter[2] == 150.0


def test_a_claim_that_lasts_is_not_lifted() -> None:
    fairness = books(a=0.0, b=0.0)
    settle(fairness, unmet="ab")
    fairness.counter[0] = 500.0
    settle(fairness, unmet="ab", served="a")
    assert fairness.counter.tolist() == [500.0, 0.0] == fairness.comparable()[0].tolist()


def test_time_that_nobody_else_wanted_is_not_owed() -> None:
    fairness = books(a=900.0, b=10.0)
    settle(fairness, served="ab")
    settle(fairness, unmet="b", served="a")
    assert fairness.counter.tolist() == [900.0, 900.0]


def test_lack_of_room_makes_and_keeps_a_claim() -> None:
    fairness = books(a=0.0, b=0.0, c=0.0)
    settle(fairness, unmet="ab")
    fairness.counter[0] = 500.0
    settle(fairness, unmet="a", blocked="bc", served="a")
    assert fairness.counter.tolist() == [500.0, 0.0, 0.0], "lifted to what held before the slot"
    fairness.counter[0] = 900.0
    settle(fairness, unmet="abc")
    assert fairness.counter.tolist() == [900.0, 0.0, 0.0]


def test_the_gap_is_that_before_the_least_claim() -> None:
    fairness = books(a=5.0, b=40.0, idle=900.0)
    fairness.closed(i32(fairness.tenant("idle")))
    assert fairness.gap_ns() == 0.0, "nobody wants more"
    fairness.claims[0] = True
    assert fairness.gap_ns() == 35.0


def test_the_lag_is_a_number_of_mean_slots() -> None:
    fairness = Fairness(10)
    fairness.tenant("a")
    assert fairness.lag_ns == 0.0
    for _ in range(50):
        charge(fairness, i32(0), np.array([1.0]), 7.0)
    assert np.isclose(fairness.lag_ns, 70.0)
