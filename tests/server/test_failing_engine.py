"""An engine that fails on everything, over HTTP: new requests get a 503 until it works again by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tests.server.fakes import FakeDriver, Health
from tests.server.served import Served, config_for, serving, until

from kaiseki.engines.embedded import EmbeddedEngine

SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
QUICK = "own_process: false, backoff_ms: 1, failing_steps: 4, probe_s: 0.05"


def sample(served: Served, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(served.get("/metrics").text)
    return next(s.value for f in families for s in f.samples if s.name == name and s.labels == labels)


def test_it_is_noticed_told_and_passes_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(config_for(folder).replace("own_process: false", QUICK)) as served:
        good = served.post(SHORT).json()["choices"]
        assert sample(served, "kaiseki_engine_failing") == 0

        engine = served.stack.engine
        assert isinstance(engine, EmbeddedEngine)

        def broken(*args: Any) -> None:
            raise RuntimeError("no memory on the device")

        monkeypatch.setattr(engine._runner, "logits", broken)
        answers = [served.post(SHORT) for _ in range(2)]  # three steps each
        assert answers[0].status_code == 500
        assert answers[0].headers["x-kaiseki-reason"] == "engine_error"

        refused = served.post(SHORT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == refused.headers["x-kaiseki-reason"] == "engine_failing"
        assert "no memory on the device" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        health = served.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "engine_failing")
        assert health.headers["retry-after"] == "1"
        assert "failed for every request" in health.json()["reason"]
        assert sample(served, "kaiseki_engine_failing") == 1
        assert sample(served, "kaiseki_engine_errors_total", then="retried") >= 2
        assert sample(served, "kaiseki_failed_steps_total") >= 4
        assert sample(served, "kaiseki_refusals_total", outcome="refused", reason="engine_failing") == 1

        monkeypatch.undo()
        until(lambda: served.get("/health").status_code == 200)
        assert served.post(SHORT).json()["choices"] == good
        until(served.idle)


def test_a_fault_that_stays_promises_nothing(client: TestClient, driver: FakeDriver) -> None:
    driver.healthy = Health(False, "EngineDied: gone", "no_progress")
    for answer in (client.get("/health"), client.post("/v1/completions", json=SHORT)):
        assert answer.status_code == 503 and "retry-after" not in answer.headers
