"""A link sends all it is given, in equal shares, never more than the scheduler may plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.sim.cluster import Links
from kaiseki.sim.links import Link, Transfer


def link(**changed: float) -> Link:
    settings = {"gb_s": 10.0, "latency_us": 0.0, "max_active": 100, "feedback_us": 0.0, "headroom": 0.0}
    return Link(Links.model_validate(settings | changed))


def drain(made: Link, waiting: list[Transfer], now: int = 0) -> list[Transfer]:
    """Start transfers in order, each as soon as it was asked for and the link lets it."""
    waiting = list(waiting)
    while True:
        made.advance(now)
        while waiting and waiting[0].asked_ns <= now and made.can_start():
            made.start(waiting.pop(0), now)
        asked = [waiting[0].asked_ns] if waiting and waiting[0].asked_ns > now else []
        due = made.next_ns()
        times = asked + ([due] if due is not None else [])
        if not times:
            return made.moved
        now = min(times)


def test_a_lone_transfer_takes_its_bytes_over_what_may_be_used_and_the_latency() -> None:
    (moved,) = drain(link(headroom=0.3, latency_us=10.0), [Transfer("a", 7e6, 100)])
    assert (moved.started_ns, moved.landed_ns) == (100, 100 + 1_000_000 + 10_000)


def test_transfers_share_and_what_one_leaves_the_others_get() -> None:
    moved = drain(link(), [Transfer("a", 1e6, 0), Transfer("b", 3e6, 0)])
    assert [(t.request_id, t.landed_ns) for t in moved] == [("a", 200_000), ("b", 400_000)]


def test_until_the_scheduler_hears_of_an_end_the_share_stays_planned() -> None:
    moved = drain(link(feedback_us=100.0), [Transfer("a", 1e6, 0), Transfer("b", 3e6, 0)])
    # b has sent 1 MB of 3 when a ends, 0.5 MB more in the 100 us before its share doubles
    assert [t.landed_ns for t in moved] == [200_000, 200_000 + 100_000 + 150_000]
    late = drain(link(feedback_us=100.0, max_active=1), [Transfer("a", 1e6, 0), Transfer("b", 1e6, 0)])
    assert [t.started_ns for t in late] == [0, 200_000]


def test_others_wait_in_order_where_the_cap_is_reached() -> None:
    moved = drain(link(max_active=1), [Transfer(name, 1e6, 0) for name in "abc"])
    assert [(t.request_id, t.started_ns) for t in moved] == [("a", 0), ("b", 100_000), ("c", 200_000)]


@given(
    st.lists(st.tuples(st.integers(1, 10**8), st.integers(0, 10**7)), min_size=1, max_size=30),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.sampled_from([0.0, 7.5, 200.0]),
)
def test_cap_and_head_room_hold_at_all_times(
    asked: list[tuple[int, int]], most: int, headroom: float, feedback_us: float
) -> None:
    made = link(max_active=most, headroom=headroom, feedback_us=feedback_us, latency_us=3.0)
    wanted = [Transfer(str(i), float(n), t) for i, (n, t) in enumerate(sorted(asked, key=lambda x: x[1]))]
    moved = drain(made, wanted)
    budget = 10.0 * (1 - headroom)
    assert sorted(int(t.request_id) for t in moved) == list(range(len(asked)))
    assert made.most_active <= most and made.peak_gb_s <= budget * (1 + 1e-12)
    spans = [(t.started_ns, t.landed_ns - 3000) for t in moved]
    for at, _ in spans:
        assert sum(begin <= at < end for begin, end in spans) <= most
    for transfer, (begin, end) in zip(moved, spans, strict=True):
        assert end - begin >= transfer.size_bytes / budget - 1
        sent_within = sum(
            t.size_bytes for t, (b, e) in zip(moved, spans, strict=True) if begin <= b and e <= end
        )
        assert sent_within <= budget * (end - begin + 1) * (1 + 1e-9)
    assert made.planned == 0
    assert [t.started_ns for t in sorted(moved, key=lambda t: int(t.request_id))] == sorted(
        t.started_ns for t in moved
    )
    assert made.next_ns() is None and made.can_start()


@pytest.mark.parametrize("cap", [1, 2, 8])
def test_the_time_to_move_all_is_the_same_under_any_cap(cap: int) -> None:
    moved = drain(link(max_active=cap), [Transfer(str(i), 1e6, 0) for i in range(8)])
    assert moved[-1].landed_ns == pytest.approx(800_000, abs=8)
