"""The engine and the server measured, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.server.served import make_folder
from typer.testing import CliRunner

from kaiseki.calibrate.client import Phase, Seen
from kaiseki.calibrate.grid import grid
from kaiseki.calibrate.here import calibrate_here
from kaiseki.calibrate.served import intake_us
from kaiseki.cli import app
from kaiseki.config import parse
from kaiseki.core.protocols import F_CHUNKS, F_DECODES, F_PREFIX, F_TOKENS, N_FEATURES
from kaiseki.cost.calibrated import SPREAD_AT, Profile
from kaiseki.engines.logged import Steps
from kaiseki.server.build import SetupError, build
from kaiseki.server.measure import Group, Round, measure

SETTINGS = "{engine: {model: %s, threads: 1, own_process: false}, memory: {pool_tokens: 3000}}"
FEW = (Round(64, (Group(2, 20, 6),)), Round(20, (Group(4, 16, 8), Group(1, 100, 1))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def test_rounds_are_measured_step_by_step(folder: Path) -> None:
    stack = build(parse(SETTINGS % folder))
    try:
        kv, capabilities = stack.driver.scheduler.kv, stack.driver.scheduler.capabilities
        (_, plain), (_, mixed) = measure(stack.engine, kv, capabilities, FEW)
        free = kv.free_blocks()
    finally:
        stack.close()
    assert plain.features[:, F_CHUNKS].tolist() == [2, 0, 0, 0, 0, 0]
    assert plain.features[:, F_DECODES].tolist() == [0, 2, 2, 2, 2, 2]
    beside = mixed.features[(mixed.features[:, F_DECODES] > 0) & (mixed.features[:, F_CHUNKS] > 0)]
    assert len(beside) and beside[:, F_PREFIX].max() > 0
    assert mixed.features[:, F_TOKENS].sum() == 4 * 16 + 100
    assert (mixed.turn_ns >= mixed.took_ns).all() and (mixed.took_ns > 0).all()
    assert free == kv.total_blocks  # nothing stays behind


def test_the_grid_has_all_kinds_of_steps() -> None:
    rounds = list(grid())
    assert len(rounds) == len(set(rounds)) > 20
    assert {len(r.groups) for r in rounds} == {1, 2}


def test_a_lone_requests_time_beyond_its_steps_is_the_intake() -> None:
    ended = (np.array([5.0, 110.0, 130.0, 200.0]) * 1e6).astype(np.int64)
    turns = (np.array([5.0, 6.0, 20.0, 9.0]) * 1e6).astype(np.int64)
    steps = Steps(np.zeros((4, N_FEATURES)), turns, turns, ended)
    assert intake_us(Seen(100.0, 130.0), steps) == pytest.approx(4000)  # 30 ms, of which 26 in two steps


def test_a_machine_is_measured_with_its_server(folder: Path) -> None:
    phases = (Phase({"interactive": 1}, 2), Phase({"interactive": 3, "batch": 1}, 1))
    profile = calibrate_here(parse(SETTINGS % folder), rounds=FEW, phases=phases)
    assert profile.host.request_us > 0
    assert len(profile.spread) == len(SPREAD_AT) and list(profile.spread) == sorted(profile.spread)
    assert profile.pipeline_depth == 1
    assert str(folder) not in profile.source and "processors" in profile.machine


def test_the_command_writes_a_profile(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kaiseki.calibrate.here.grid", lambda: FEW)
    config, out = tmp_path / "settings.yaml", tmp_path / "profile.json"
    config.write_text(SETTINGS % folder)
    arguments = ["calibrate", "--config", str(config), "--out", str(out), "--engine-only", "--json"]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert document["profile"] == str(out)
    assert set(document["fit_error"]) == {"median", "p90", "max"}
    assert Profile.load(out).host.request_us == 0


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--config", "none.yaml"], "cannot read none.yaml"),
        (["--vllm", "none.json"], "none.json: No such file"),
        (["--tables", "h100"], "needs --model"),
        (["--tables", "h100", "--vllm", "x"], "only one of them"),
        (["--model", "./nowhere"], "nowhere"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], message: str) -> None:
    ran = CliRunner().invoke(app, ["calibrate", *arguments])
    assert ran.exit_code == 2
    assert message in ran.stderr


def test_a_server_starts_from_a_profile(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = calibrate_here(parse(SETTINGS % folder), with_server=False, rounds=FEW)
    path = tmp_path / "profile.json"
    profile.save(path)
    settings = parse(SETTINGS % folder)
    engine = settings.engine.model_copy(update={"profile": str(path)})
    monkeypatch.setattr("kaiseki.server.build.step_weights", None)  # nothing is measured
    stack = build(settings.model_copy(update={"engine": engine}))
    assert stack.driver.scheduler.cost.planes()[0, 0] == pytest.approx(profile.linear)
    stack.close()
    path.write_text("{}")
    with pytest.raises(SetupError, match="no profile: source: Field required; weights"):
        build(settings.model_copy(update={"engine": engine}))
