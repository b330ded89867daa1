"""Explanations, state, health and metrics, and who may see what."""

from __future__ import annotations

import math

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.fakes import Connect, FakeDriver, Health

from kaiseki.config import key_digest

KEYS = f"""
tenants:
  acme: {{api_key_sha256: [{key_digest("acme")}]}}
  labs: {{api_key_sha256: [{key_digest("labs")}]}}
  boss: {{operator: true, api_key_sha256: [{key_digest("boss")}]}}
"""


@pytest.fixture(autouse=True)
def documents(driver: FakeDriver) -> None:
    for name, tenant in (("r1", "acme"), ("r2", "labs"), ("r2-1", "labs")):
        cutoff = {"key": -math.inf, "n": np.int32(3)}
        driver.documents[name] = {"request": name, "tenant": tenant, "timeline": [cutoff]}


def test_a_tenant_sees_its_own_requests_and_an_operator_all(connect: Connect) -> None:
    seen = {}
    for key in ("acme", "labs", "boss"):
        client = connect(KEYS, key=key)
        seen[key] = [
            n for n in ("r1", "r2", "r2-1") if client.get(f"/kaiseki/v1/requests/{n}").status_code == 200
        ]
        listed = client.get("/kaiseki/v1/requests").json()["requests"]
        assert [d["request"] for d in listed] == seen[key]
    assert seen == {"acme": ["r1"], "labs": ["r2", "r2-1"], "boss": ["r1", "r2", "r2-1"]}


def test_what_belongs_to_others_looks_like_what_is_not_there(connect: Connect) -> None:
    client = connect(KEYS, key="acme")
    others, nobodys = client.get("/kaiseki/v1/requests/r2"), client.get("/kaiseki/v1/requests/zz")
    assert others.status_code == nobodys.status_code == 404
    assert others.json()["error"]["message"].replace("r2", "zz") == nobodys.json()["error"]["message"]


def test_ids_as_they_stand_in_bodies_work_too(connect: Connect) -> None:
    client = connect(KEYS, key="boss")
    for form in ("chatcmpl-r1", "cmpl-r1", "r1"):
        assert client.get(f"/kaiseki/v1/requests/{form}").json()["request"] == "r1"


def test_numpy_and_infinity_are_plain_json(connect: Connect) -> None:
    document = connect(KEYS, key="boss").get("/kaiseki/v1/requests/r1").json()
    assert document["timeline"] == [{"key": None, "n": 3}]


def test_limit(connect: Connect) -> None:
    client = connect(KEYS, key="boss")
    assert len(client.get("/kaiseki/v1/requests?limit=2").json()["requests"]) == 2
    for wrong in ("0", "-1", "x", "1001", ""):
        assert client.get(f"/kaiseki/v1/requests?limit={wrong}").status_code == 400


def test_state(connect: Connect) -> None:
    whole = connect(KEYS, key="boss").get("/kaiseki/v1/state").json()
    assert set(whole["tenants"]) == {"acme", "labs"}
    assert whole["kv"]["total_blocks"] == 10
    part = connect(KEYS, key="acme").get("/kaiseki/v1/state").json()
    assert part == {"slot": 3, "policy": "fcfs", "tenants": {"acme": {"weight": 3.0}}}
    assert connect(KEYS, key="no").get("/kaiseki/v1/state").status_code == 401
    assert connect(KEYS).get("/kaiseki/v1/requests").status_code == 401


def test_health(connect: Connect, driver: FakeDriver) -> None:
    client = connect()
    assert client.get("/health").json() == {"status": "ok"}
    driver.healthy = Health(False, "no slot finished for 70 s with 3 requests open", "no_progress")
    response = client.get("/health")
    assert (response.status_code, response.headers["x-kaiseki-reason"]) == (503, "no_progress")
    assert "70 s" in response.json()["reason"]
    driver.healthy = Health()
    client.app.state.service.draining = True
    assert client.get("/health").json()["status"] == "draining"


OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_metrics_keep_their_names_whatever_a_scraper_likes_best(connect: Connect, accept: str) -> None:
    response = connect().get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(response.text)}
    assert {"vllm:num_requests_running", "kaiseki_slot_seconds", "process_cpu_seconds"} <= names
    assert "\nvllm:num_requests_running{" in response.text
