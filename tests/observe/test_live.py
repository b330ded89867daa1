"""The live view: what ran, who runs, who waits for what."""

from __future__ import annotations

from typing import Any

from tests.harness import Bench, job

from kaiseki.core.settings import SchedulerSettings

SETTINGS = SchedulerSettings(max_batch_size=2)


def full(tenant_of_last: str = "labs") -> Bench:
    """Two requests run, a third finds no row."""
    bench = Bench("fcfs", settings=SETTINGS)
    for name, tenant in (("a", "acme"), ("b", "labs"), ("c", tenant_of_last)):
        bench.submit(job(name, 40, 20, tenant=tenant), list(range(40)))
    for _ in range(4):
        bench.driver.step()
    return bench


def test_slots_tell_who_ran_what() -> None:
    bench = full()
    document = bench.driver.live(-1)
    slots = document["slots"]
    assert [slot for slot, *_ in slots] == sorted({slot for slot, *_ in slots})
    chunks = [chunk for *_, ran in slots for chunk in ran]
    assert sum(tokens for name, tokens, _ in chunks if name == "a") == 40 + len(slots) - 1
    assert all(start <= end for _, start, end, _ in slots)
    assert document["tokens"] == {
        tenant: sum(tokens for name, tokens, _ in chunks if name == first)
        for tenant, first in (("acme", "a"), ("labs", "b"))
    }


def test_only_what_is_new_is_told_again() -> None:
    bench = full()
    first = bench.driver.live(-1)
    assert bench.driver.live(first["slot"])["slots"] == []
    bench.driver.step()
    after = bench.driver.live(first["slot"])
    assert [slot for slot, *_ in after["slots"]] == [first["slot"] + 1]


def test_waiting_requests_have_a_lane_and_a_reason() -> None:
    lanes = {lane["request"]: lane for lane in full().driver.live(-1)["requests"]}
    assert [lanes[name]["state"] for name in "abc"] == ["running", "running", "waiting"]
    assert lanes["c"]["reason"] == "no_row"
    assert lanes["a"]["reason"] is None


def test_the_queue_is_told_by_tenant_and_reason() -> None:
    queue = full().driver.live(-1)["queue"]
    assert [(q["tenant"], q["waiting"], q["reason"]) for q in queue] == [("labs", 1, "no_row")]


def test_blocks_are_told_by_owner() -> None:
    kv = full().driver.live(-1)["kv"]
    held: dict[str, Any] = {name: blocks for name, _, blocks in kv["held"]}
    assert held.keys() == {"a", "b"}
    assert sum(held.values()) == kv["live_blocks"]


def test_a_tenant_sees_nothing_of_others() -> None:
    document = full(tenant_of_last="acme").driver.live(-1, "labs")
    assert [lane["request"] for lane in document["requests"]] == ["b"]
    assert {name for *_, ran in document["slots"] for name, *_ in ran} == {"b"}
    assert document["queue"] == []
    assert [name for name, *_ in document["kv"]["held"]] == ["b"]
    assert document["tokens"].keys() == {"labs"}
    assert {name for _, name, *_ in document["marks"]} <= {"b"}
