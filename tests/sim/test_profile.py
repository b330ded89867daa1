"""Pools whose step times were measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.sim.loads import PLAN
from tests.sim.running import run_all, without_wall

from kaiseki.core.requests import ServiceClass
from kaiseki.cost.calibrated import FitError, Host, Profile
from kaiseki.cost.online import OnlineLinear
from kaiseki.policies.registry import load as policy
from kaiseki.sections import ConfigError
from kaiseki.sim import cluster
from kaiseki.sim.arrivals import Arrivals
from kaiseki.sim.run import Case, simulate
from kaiseki.work import classes
from kaiseki.work.batches import Batch
from kaiseki.work.shaping import Shape

MS = 1_000_000
WEIGHTS = (10.0 * MS, 1.0 * MS, 0.0, 0.5 * MS, 0.0, 0.0, 0.0)
"""A step takes 10 ms, 1 ms for each decode and 0.5 for each prompt token."""
FLAT = Profile(
    source="made up",
    weights=WEIGHTS,
    bends=(),
    linear=tuple(max(w, 1.0) for w in WEIGHTS),
    fit_error=FitError(median=0, p90=0, max=0),
    samples=1,
)
CLUSTER = """
model: smollm2-135m
pools:
  - {name: main, card: cpu, kv_blocks: 400, max_batch_size: 32, profile: %s, %s}
"""


def case(folder: Path, profile: Profile, batch: Batch, more: str = "tp: 1") -> Case:
    profile.save(folder / "profile.json")

    def stream(shape: Shape) -> Iterator[Batch]:
        return shape.apply([batch])

    fleet = cluster.fleet(cluster.parse(CLUSTER % (folder / "profile.json", more)))
    return Case(stream, classes.parse(PLAN), fleet)


def batch(at_ms: list[float], prompt: int = 20, output: int = 4) -> Batch:
    n = len(at_ms)
    at = (np.array(at_ms) * MS).astype(np.int64)
    return Batch.of(0, at, np.full(n, prompt), np.full(n, output))


def first_tokens_ms(case: Case) -> list[float]:
    endings = sorted(run_all(case, "fcfs").log.endings, key=lambda pair: int(pair[0].id))
    return [(ending.first_token_ns - ending.arrival_ns) / MS for _, ending in endings]


def test_steps_take_what_the_profile_says(tmp_path: Path) -> None:
    ran = run_all(case(tmp_path, FLAT, batch([0.0])), "fcfs")
    (_, ending), *_ = ran.log.endings
    assert ending.first_token_ns / MS == pytest.approx(20)
    assert np.concatenate(ran.log.gaps) / MS == pytest.approx([11, 11, 11])


def test_the_hosts_time_comes_on_top(tmp_path: Path) -> None:
    host = Host(step_us=2000, token_us=500, request_us=3000)
    ran = run_all(case(tmp_path, FLAT.model_copy(update={"host": host}), batch([0.0])), "fcfs")
    assert np.concatenate(ran.log.gaps) / MS == pytest.approx([13.5] * 3)
    figures = simulate(case(tmp_path, FLAT.model_copy(update={"host": host}), batch([0.0])), policy("fcfs"))
    assert figures["ttft_ms"]["p50"] == pytest.approx(25)  # of which 3 until the scheduler knows of it


def test_an_engine_that_takes_a_decision_ahead_has_newcomers_wait_for_one_step_more(tmp_path: Path) -> None:
    load = batch([0.0, 25.0], output=20)  # the second comes while the first decodes
    plain = first_tokens_ms(case(tmp_path, FLAT, load))
    ahead = first_tokens_ms(case(tmp_path, FLAT.model_copy(update={"pipeline_depth": 1}), load))
    assert plain == pytest.approx([20, 31 - 25 + 21])
    assert ahead == pytest.approx([20, 31 - 25 + 11 + 21])


@pytest.mark.parametrize("name", ["fcfs", "kaiseki", "priority"])
def test_a_full_pool_with_a_decision_ahead_loses_no_token(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(5)
    arrivals = np.sort(rng.integers(0, 4000 * MS, 60))
    load = Batch.of(0, arrivals, rng.integers(10, 60, 60), rng.integers(100, 300, 60))
    small = case(tmp_path, FLAT.model_copy(update={"pipeline_depth": 1}), load)
    for description in small.fleet:
        description.blocks = 40
    ran = run_all(small, name)
    done = [e for r, e in ran.log.endings if e.outcome.label == "completed" and e.outputs == r.max_tokens]
    assert len(done) == 60
    assert sum(e.preemptions for _, e in ran.log.endings) > 0


def test_the_spread_makes_steps_uneven_and_repeats_with_its_seed(tmp_path: Path) -> None:
    spread = (0.8, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0)
    uneven = case(tmp_path, FLAT.model_copy(update={"spread": spread}), batch([0.0], output=200))
    one, same = (simulate(uneven, policy("fcfs")) for _ in range(2))
    other = simulate(replace(uneven, seed=2), policy("fcfs"))
    assert without_wall(one) == without_wall(same) != without_wall(other)
    assert one["tbt_ms"]["p50"] == pytest.approx(11, rel=0.05) and one["tbt_ms"]["p99"] > 14


def test_the_scheduler_learns_the_times_as_a_server_does(tmp_path: Path) -> None:
    wrong = FLAT.model_copy(update={"linear": tuple(w / 2 for w in FLAT.linear)})
    (replica,) = run_all(case(tmp_path, wrong, batch([0.0], output=200)), "kaiseki").replicas
    model = replica.scheduler.cost
    assert isinstance(model, OnlineLinear)
    assert model.planes()[0, 0] @ (1, 1, 0, 0, 0, 0, 0) == pytest.approx(11 * MS, rel=0.05)


def test_a_queue_with_a_limit_refuses(tmp_path: Path) -> None:
    crowd = case(tmp_path, FLAT, batch([0.0] * 60, output=50), "max_waiting: 5")
    figures = simulate(crowd, policy("fcfs"))
    assert figures["refused"] == 54  # the first began at once
    assert figures["completed"] == 6


def test_requests_may_say_how_long_their_outputs_are() -> None:
    given = (batch([5.0], output=7), [ServiceClass()], ["default"], 16)
    told = Arrivals([given[0]], *given[1:], intake_ns=2 * MS, exact_outputs=True)
    assert told.next_ns() == 7 * MS
    request = told.pop().request
    assert request.min_tokens == 7 and request.arrival_ns == 5 * MS
    assert Arrivals([given[0]], *given[1:]).pop().request.min_tokens == 1


@pytest.mark.parametrize(
    "content,more,message",
    [
        (None, "tp: 1", "No such file or directory; `kaiseki calibrate` writes one"),
        ("{}", "tp: 1", "weights"),
        ("[", "tp: 1", "JSON"),
        (FLAT.model_dump_json(), "pp: 2", "pp must be 1"),
        (FLAT.model_dump_json(), "host_ms: 2.0", "host_ms must be left out"),
    ],
)
def test_what_is_wrong_with_a_profile_is_told(
    tmp_path: Path, content: str | None, more: str, message: str
) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"(?s)pools\[0\]\.profile: .*{message}"):
        cluster.fleet(cluster.parse(CLUSTER % (path, more)))
