"""Profiles from published tables; a stand-in for the package that has them, where it is not installed."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from kaiseki.calibrate import tables
from kaiseki.calibrate.tables import NoTables, from_tables
from kaiseki.cost.calibrated import Calibrated
from kaiseki.cost.features import chunk_features


class Handle:
    """Steps of 5 ms, 0.02 for a decode, 0.05 for a prompt token, 1e-5 for a token of context; ms."""

    @classmethod
    def compile(cls, model: str, system: str, engine: str, tp_size: int) -> Handle:
        if model != "org/model":
            raise ValueError("unknown model")
        return cls()

    def predict_decode_latency(self, batch: int, context: int) -> float:
        return 5 + batch * (0.02 + 1e-5 * (context + 1))

    def predict_prefill_latency(self, batch: int, length: int, prefix: int) -> float:
        return 5 + 0.05 * (length - prefix)

    def mixed_step_latency(self, chunk: int, decodes: int, prompt: int, output: int) -> float:
        assert chunk == prompt
        return 5 + 0.05 * chunk + decodes * (0.02 + 1e-5 * (prompt + output / 2))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk", "aiconfigurator_core.sdk.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    engine: Any = sys.modules["aiconfigurator_core.sdk.engine"]
    engine.EngineHandle = Handle
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.0")


@pytest.mark.usefixtures("installed")
def test_the_profile_says_what_the_tables_say() -> None:
    profile = from_tables("org/model", "h100", 2, "vllm")
    model = Calibrated(profile)
    mixed = chunk_features([3000] * 10, [1000], [500])
    assert model.iteration_ns(mixed) / 1e6 == pytest.approx(5 + 25 + 10 * 0.05, rel=0.02)
    assert profile.fit_error.p90 < 0.01 and not profile.spread
    assert "0.12.0" in profile.source and "org/model" in profile.source


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "model,card,engine,message",
    [
        ("org/model", "h1000", "vllm", "h1000.*must be one of a100-80, b200"),
        ("org/model", "h100", "tgi", "tgi.*must be one of vllm"),
        ("org/other", "h100", "vllm", "nothing for org/other on 1 x h100_sxm with vllm: unknown model"),
    ],
)
def test_what_there_is_no_table_of_is_told(model: str, card: str, engine: str, message: str) -> None:
    with pytest.raises(NoTables, match=message):
        from_tables(model, card, 1, engine)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(NoTables, match=r"kaiseki\[profiles\]"):
        from_tables("org/model", "h100", 1, "vllm")
    assert "aiconfigurator" not in str(sorted(vars(tables)))
