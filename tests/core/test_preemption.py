"""Who is stopped: forced, and by purchase."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.core.preemption import (
    choose_forced,
    choose_purchase,
    miss_probability,
    newcomer_value,
    slack_ns,
    victim_prices,
)
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.table import RequestTable, View

S = 1_000_000_000
TAU = 1.0 * S


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def view(lone_s: float = 0.1, **columns: list[float] | float) -> View:
    table = RequestTable(4)
    n = max([len(v) for v in columns.values() if isinstance(v, list)], default=1)
    rows = i32(*(table.take() for _ in range(n)))
    for name, values in columns.items():
        getattr(table, name)[rows] = values
    return View(table, rows, np.zeros(n, np.int32), lone_s * S, 0.0, lone_s * S, 0.0)


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 12))
def test_forced_victims_are_the_fewest_cheapest_that_cover_it(steps: list[int], shortage: int) -> None:
    freed = np.cumsum(np.array(steps, np.int64))
    rows = np.arange(len(steps), dtype=np.int32)
    chosen = choose_forced(rows, freed, shortage)
    if not steps or freed[-1] == 0:
        assert chosen.size == 0
    elif freed[-1] < shortage:
        assert chosen.size == rows.size
    else:
        assert freed[chosen.size - 1] >= shortage
        assert chosen.size == 1 or freed[chosen.size - 2] < shortage


def test_a_purchase_needs_strict_profit_and_enough_blocks() -> None:
    rows, prices, freed = i32(5, 6, 7), np.array([1.0, 2.0, 4.0]), np.array([2, 4, 9])
    deal = choose_purchase(rows, prices, freed, 3, value=3.5)
    assert deal is not None and deal.victims.tolist() == [5, 6] and (deal.price, deal.value) == (3.0, 3.5)
    assert choose_purchase(rows, prices, freed, 3, value=3.0) is None
    assert choose_purchase(rows, prices, freed, 10, value=99.0) is None
    one = choose_purchase(rows, prices, freed, 0, value=1.5)
    assert one is not None and one.victims.tolist() == [5]
    assert choose_purchase(rows[:0], prices[:0], freed[:0], 0, value=99.0) is None


def test_the_chance_of_missing_falls_with_slack() -> None:
    chance = miss_probability(np.array([-5.0, 0.0, TAU, np.inf]), TAU)
    assert chance.tolist() == pytest.approx([1.0, 1.0, np.exp(-1), 0.0])


def test_slack_is_to_the_nearest_target() -> None:
    v = view(
        lone_s=0.5,
        ttft_ns=[2 * S, 2 * S, NEVER_NS, NEVER_NS, 2 * S],
        tbt_ns=[S, S, NEVER_NS, NEVER_NS, S],
        deadline_ns=[NEVER_NS, NEVER_NS, 3 * S, NEVER_NS, NEVER_NS],
        first_token_ns=[-1, 4 * S, -1, -1, -1],
        last_token_ns=[-1, 4 * S, -1, -1, -1],
        demoted=[False, False, False, False, True],
    )
    assert slack_ns(v, 0).tolist() == [1.5 * S, 4.5 * S, 2.5 * S, np.inf, np.inf]


def test_equals_are_never_for_sale() -> None:
    same = {"ttft_ns": [S], "weight": [2.0], "tier": [1]}
    assert np.isinf(victim_prices(view(**same), view(**same), 0, TAU, 1.0)).all()


@pytest.mark.parametrize(
    ("victim", "sold"),
    [
        ({"weight": [1.0]}, True),
        ({"tier": [2]}, True),
        ({"ttft_ns": [2 * S]}, True),
        ({"demoted": [True]}, True),
        ({"weight": [3.0], "ttft_ns": [2 * S]}, False),
        ({"tier": [0], "ttft_ns": [2 * S]}, False),
        ({"weight": [3.0], "demoted": [True]}, False),
    ],
)
def test_only_who_is_outranked_and_no_better_is_for_sale(victim: dict[str, list[float]], sold: bool) -> None:
    base: dict[str, list[float]] = {"ttft_ns": [S], "weight": [2.0], "tier": [1]}
    prices = victim_prices(view(**{**base, **victim}), view(**base), 0, TAU, 1.0)
    assert np.isfinite(prices).all() == sold


@given(
    st.lists(
        st.tuples(st.sampled_from((1.0, 2.0)), st.integers(0, 1), st.sampled_from((S, 2 * S))),
        min_size=2,
        max_size=2,
    )
)
def test_no_two_requests_can_displace_each_other(pair: list[tuple[float, int, int]]) -> None:
    (a, b) = ({"weight": [p[0]], "tier": [p[1]], "ttft_ns": [p[2]]} for p in pair)
    there = np.isfinite(victim_prices(view(**a), view(**b), 0, TAU, 1.0)).any()
    back = np.isfinite(victim_prices(view(**b), view(**a), 0, TAU, 1.0)).any()
    assert not (there and back)


def test_the_price_is_recompute_time_plus_the_rise_in_its_own_chance_to_miss() -> None:
    newcomer = view(lone_s=0.2, ttft_ns=[S], weight=[4.0])
    idle = view(lone_s=0.3, weight=[1.0])
    assert victim_prices(idle, newcomer, 0, TAU, 10.0).tolist() == pytest.approx([0.3])
    dated = view(lone_s=0.3, weight=[1.0], deadline_ns=[2 * S])
    rise = np.exp(-1.2) - np.exp(-1.7)
    assert victim_prices(dated, newcomer, 0, TAU, 10.0).tolist() == pytest.approx([0.3 + 10 * rise])


def test_a_newcomer_is_worth_its_weight_times_its_chance_to_miss() -> None:
    late = view(lone_s=0.2, ttft_ns=[S], weight=[4.0])
    assert newcomer_value(late, 0, TAU, 2.0) == pytest.approx(2 * 4 * np.exp(-0.8))
    assert newcomer_value(view(weight=[4.0]), 0, TAU, 2.0) == 0.0
