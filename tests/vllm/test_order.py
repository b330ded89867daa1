"""Who goes first inside vLLM: order, purchases, refusals, expiry, shares. No model; a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs what needs vLLM")

from tests.vllm.rig import MS, Rig

from kaiseki.core.reasons import Event, Outcome, Reason

CLASSES = {
    "urgent": {"ttft_ms": 300, "tbt_ms": 60, "weight": 8},
    "normal": {"ttft_ms": 20_000, "tbt_ms": 200, "weight": 1},
    "strict": {"ttft_ms": 200, "on_late": "expire"},
}


def settings(**sections: Any) -> dict[str, Any]:
    return {"classes": CLASSES} | sections


def purchases(rig: Rig) -> int:
    return sum(r["event"] == Event.PREEMPTED and r["reason"] == Reason.PURCHASED for r in rig.records)


@pytest.mark.parametrize("depth", [0, 1])
def test_s04_an_urgent_arrival_finds_a_place_in_a_full_batch_at_once(depth: int) -> None:
    rig = Rig(settings(), depth=depth, max_num_seqs=8)
    for i in range(16):
        rig.add(f"n{i}", 100, 200, **{"class": "normal"})
    while len(rig.scheduler.running) < 8:
        rig.step()
    assert purchases(rig) == 0
    rig.add("urgent", 100, 20, **{"class": "urgent"})
    assert "urgent" in rig.step()
    assert purchases(rig) == 1
    rig.run()
    assert all(one.finish == "length" for one in rig.told.values())
    assert rig.told["urgent"].ttft_ns <= 300 * MS
    for name in ("n0", "n15", "urgent"):
        assert rig.told[name].tokens == rig.expected(name, 20 if name == "urgent" else 200)


def test_s04_equals_never_displace_each_other() -> None:
    rig = Rig(settings(scheduling={"slo_lambda": 1000.0}), max_num_seqs=4)
    for i in range(16):
        rig.add(f"n{i}", 50, 30, **{"class": "normal"})
        rig.step()
    rig.run()
    assert purchases(rig) == 0


def crowd(kaiseki: dict[str, Any] | None, policy: str = "fcfs") -> Rig:
    """32 places, 40 at normal, and one that is urgent; 24 ms a step and 0.8 ms a decode."""
    rig = Rig(
        kaiseki,
        step_ns=lambda decodes, prompt: 24 * MS + 0.8 * MS * decodes + 0.05 * MS * prompt,
        scheduling_policy=policy,
    )
    for i in range(40):
        rig.add(f"n{i}", 100, 200, **{"class": "normal", "priority": 1})
    for _ in range(20):
        rig.step()
    rig.add("urgent", 100, 100, **{"class": "urgent", "priority": 0})
    rig.run()
    return rig


def late(rig: Rig) -> bool:
    """Whether the urgent one missed its TTFT, or more than one of its gaps was late."""
    one = rig.told["urgent"]
    return one.ttft_ns > 300 * MS or sum(gap > 60 * MS for gap in one.gaps_ns) > 1


def test_s05_the_urgent_one_meets_its_class_where_vllms_best_order_misses() -> None:
    assert late(crowd(None)) and late(crowd(None, "priority"))
    rig = crowd(settings())
    # The core learns how long steps take; until it has, a gap may be late.
    assert not late(rig), (rig.told["urgent"].ttft_ns / MS, [g / MS for g in rig.told["urgent"].gaps_ns])
    assert all(len(one.tokens) == (100 if name == "urgent" else 200) for name, one in rig.told.items())


def test_s08_what_never_fits_is_refused_with_both_numbers() -> None:
    rig = Rig(settings(), blocks=33)
    rig.add("large", 500, 100, key=77)
    rig.add("small", 100, 5)
    rig.run()
    assert rig.told["large"].finish == "error" and rig.told["large"].tokens == []
    assert rig.told["small"].finish == "length"
    ended = rig.scheduler.board.find(77)
    assert ended.outcome is Outcome.REFUSED and ended.reason is Reason.NEVER_FITS
    assert ended.numbers["tokens"] == 600 and ended.numbers["pool_tokens"] == 512


def test_s12_those_that_expire_in_the_queue_cost_no_prefill() -> None:
    rig = Rig(settings(), max_num_seqs=1)
    rig.add("long", 100, 100, **{"class": "normal"})
    for _ in range(3):
        rig.step()
    for i in range(10):
        rig.add(f"s{i}", 100, 10, key=100 + i, **{"class": "strict", "priority": 5})
    rig.run()
    gone = [name for name, one in rig.told.items() if one.finish == "error"]
    assert gone and all(rig.told[name].tokens == [] for name in gone)
    assert not any(name in step for step in rig.steps for name in gone)
    for name in gone:
        ended = rig.scheduler.board.find(100 + int(name[1:]))
        assert ended.outcome is Outcome.EXPIRED and ended.reason is Reason.HOPELESS


def test_the_queue_has_limits() -> None:
    rig = Rig(settings(scheduling={"max_waiting": 3}), max_num_seqs=1)
    for i in range(8):
        rig.add(f"r{i}", 50, 5, key=1 + i)
    rig.run()
    refused = [i for i in range(8) if rig.told[f"r{i}"].finish == "error"]
    assert len(refused) == 5
    ended = rig.scheduler.board.find(1 + refused[0])
    assert ended.reason is Reason.QUEUE_FULL and ended.retry_after_s >= 1.0


def test_s29_priority_orders_within_a_class() -> None:
    rig = Rig(settings(), max_num_seqs=1)
    rig.add("first", 50, 5)
    rig.step()
    for name, priority in (("late", 10), ("silent", 0), ("early", -10)):
        rig.add(name, 50, 5, priority=priority)
    rig.run()
    order = sorted(("late", "silent", "early"), key=lambda name: rig.told[name].times_ns[0])
    assert order == ["early", "silent", "late"]


def test_tenants_get_their_shares() -> None:
    shares = settings(
        tenants={"big": {"weight": 3}, "small": {"weight": 1}}, scheduling={"fairness_window": 5}
    )
    rig = Rig(shares, max_num_seqs=4, max_num_batched_tokens=128)
    for i in range(60):
        rig.add(f"big{i}", 200, 4, tenant="big")
        rig.add(f"small{i}", 200, 4, tenant="small")
    while sum(one.finish is not None for one in rig.told.values()) < 60:
        rig.step()
    done = {
        who: sum(one.finish is not None for name, one in rig.told.items() if name.startswith(who))
        for who in ("big", "small")
    }
    assert 2.2 <= done["big"] / done["small"] <= 4.0, done
