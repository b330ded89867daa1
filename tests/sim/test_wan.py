"""Clusters far apart: requests are placed in slots, and targets hold where their clients are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.sim.loads import PLAN, load
from tests.sim.running import run_all

from kaiseki.core.reasons import Outcome
from kaiseki.sim import cluster
from kaiseki.sim.cluster import Happens
from kaiseki.sim.run import Case
from kaiseki.work import classes
from kaiseki.work.batches import Batch
from kaiseki.work.shaping import Shape

GOOD = """
model: llama-3-8b
clusters:
  - {name: east, share: %f, pools: [{name: e, card: a100-80, kv_blocks: 4000}]}
  - {name: west, share: %f, pools: [{name: w, card: a100-80, kv_blocks: 4000}]}
wan: {latency_ms: %f, slot_ms: %f}
"""


def apart(
    batch: Batch,
    router: str = "kv-aware",
    east: float = 1.0,
    west: float = 1.0,
    ms: float = 30,
    slot: float = 20,
) -> Case:
    described = cluster.parse(GOOD % (east, west, ms, slot))

    def stream(shape: Shape) -> Iterator[Batch]:
        return shape.apply([batch])

    return Case(
        stream, classes.parse(PLAN), cluster.fleet(described), router=router,
        wan=described.wan, shares=described.shares(),
    )  # fmt: skip


def test_a_request_waits_for_its_slot_and_travels_there_and_back() -> None:
    one = Batch.of(0, [7_000_000], [700], [1])
    here = run_all(apart(one, east=1e6, west=1e-6)).log.endings[0][1]
    # Round robin with this seed begins with the second replica, which is far away.
    there = run_all(apart(one, "round-robin", east=1e6, west=1e-6)).log.endings[0][1]
    assert there.ended_ns - here.ended_ns == 30_000_000, "it comes a latency later"
    assert here.arrival_ns - there.arrival_ns == 30_000_000, "and its answer takes one as well"
    assert here.admitted_ns == 20_000_000 and here.arrival_ns == 7_000_000


@pytest.mark.parametrize("ms", [5.0, 50.0])
@pytest.mark.parametrize("slot", [10.0, 50.0])
def test_all_end_once_and_far_ones_only_when_it_pays(ms: float, slot: float) -> None:
    ran = run_all(apart(load(60, 4.0), ms=ms, slot=slot))
    assert sorted(int(r.id) for r, _ in ran.log.endings) == list(range(60))
    assert all(e.outcome == Outcome.COMPLETED for _, e in ran.log.endings)
    assert all(r.kv.live_blocks() == 0 for r in ran.replicas)


def test_a_cluster_that_gets_everything_sends_some_to_the_other() -> None:
    def busy(router: str, rate: float) -> list[int]:
        ran = run_all(apart(load(100, rate), router, east=1e6, west=1e-6))
        return [r.engine.iterations for r in ran.replicas]

    light, heavy = busy("kv-aware", 1.0), busy("kv-aware", 40.0)
    assert light[1] < 0.2 * light[0]
    assert heavy[1] > 0.5 * heavy[0]


def test_a_failing_cluster_loses_nobody() -> None:
    events = [Happens(at_s=1.0, what="fail", pool="e"), Happens(at_s=3.0, what="recover", pool="e")]
    ran = run_all(replace(apart(load(40, 10.0)), events=events))
    assert sorted(int(r.id) for r, _ in ran.log.endings) == list(range(40))
    assert {e.outcome for _, e in ran.log.endings} == {Outcome.COMPLETED} and ran.log.retried > 0
    assert sum(g.size for g in ran.log.gaps) == sum(e.outputs - 1 for _, e in ran.log.endings)
    assert min(np.concatenate(ran.log.gaps)) > 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (GOOD.replace("wan:", "#"), ("wan", "latency_ms, slot_ms")),
        (GOOD.replace("name: w,", "name: e,"), ("clusters[1].pools[0].name", "e", "its own")),
        (GOOD.replace("card: a100-80, kv_blocks: 4000}]}\nwan", "card: a1, kv_blocks: 4}]}\nwan"),
         ("clusters[1].pools[0].card", "a1", "a100-80")),
        (GOOD + "pools: [{name: x, card: h100}]\n", ("pools", "not both")),
        (GOOD.replace("name: w,", "name: w, role: decode,"), ("clusters[1].pools", "role: prefill")),
        ("model: llama-3-8b\n", ("pools", "either pools or clusters")),
        ("model: llama-3-8b\npools: [{name: x, card: h100}]\nwan: {latency_ms: 5}\n",
         ("wan", "only one cluster")),
    ],
)  # fmt: skip
def test_a_mistake_is_named(wrong: str, says: tuple[str, ...]) -> None:
    text = wrong % (1, 1, 30, 20) if "%f" in wrong and "wan:" in wrong else wrong.replace("%f", "1")
    with pytest.raises(cluster.ConfigError) as caught:
        cluster.fleet(cluster.parse(text))
    for part in says:
        assert part in str(caught.value)
