"""Keys, tenants, classes, targets and priorities (s29)."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.server.fakes import Connect, FakeDriver

from kaiseki.config import Settings, key_digest, parse
from kaiseki.core.requests import Request
from kaiseki.server.identity import Directory
from kaiseki.server.slo import MAX_OFFSET, offset

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
KEYS = f"""
classes:
  interactive: {{ttft_ms: 500, tbt_ms: 60, weight: 4}}
  standard: {{ttft_ms: 2000, tbt_ms: 120, weight: 2, tier: 1}}
  batch: {{deadline_s: 600, tier: 2}}
tenants:
  acme: {{weight: 3, class: interactive, api_key_sha256: [{key_digest("acme-1")}, {key_digest("acme-2")}]}}
  labs: {{class: batch, classes: [standard], api_key_sha256: [{key_digest("labs")}]}}
  gate: {{trusted: true, class: standard, api_key_sha256: [{key_digest("gate")}]}}
  boss: {{operator: true, api_key_sha256: [{key_digest("boss")}]}}
"""


@pytest.fixture
def ask(connect: Connect, driver: FakeDriver) -> Any:
    client = connect(KEYS)

    def send(key: str, headers: dict[str, str] | None = None, **body: Any) -> Request:
        response = client.post(
            "/v1/chat/completions",
            json=CHAT | body,
            headers={"authorization": f"Bearer {key}"} | (headers or {}),
        )
        assert response.status_code == 200, response.text
        return driver.requests[-1]

    return send


def code(client: TestClient, url: str = "/v1/models", **headers: str) -> tuple[int, str | None]:
    response = client.get(url, headers=headers)
    return response.status_code, response.headers.get("x-kaiseki-reason")


def test_keys(connect: Connect, ask: Any) -> None:
    client = connect(KEYS)
    assert code(client) == (401, "missing_api_key")
    assert code(client, authorization="Basic acme-1") == (401, "missing_api_key")
    assert code(client, authorization="Bearer nope") == (401, "invalid_api_key")
    assert code(client, authorization=f"Bearer {key_digest('acme-1')}") == (401, "invalid_api_key")
    assert code(client, authorization="bearer acme-2") == (200, None)
    # Before the body is looked at, so that strangers learn nothing.
    response = client.post("/v1/chat/completions", content=b"{")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert code(client, "/health") == (200, None)
    assert code(client, "/metrics") == (200, None)
    assert ask("acme-1").tenant == "acme"
    assert ask("labs").tenant == "labs"


def test_a_fairness_id_is_believed_from_a_trusted_caller_only(ask: Any) -> None:
    for header in ("x-llm-d-inference-fairness-id", "X-Gateway-Inference-Fairness-Id"):
        assert ask("gate", {header: "acme"}).tenant == "acme"
        assert ask("gate", {header: "user-17"}).tenant == "user-17"
        assert ask("acme-1", {header: "labs"}).tenant == "acme"
        assert ask("boss", {header: "labs"}).tenant == "boss"
    assert ask("gate", {"x-llm-d-inference-fairness-id": "acme"}).cls.name == "interactive"
    assert ask("gate", {"x-llm-d-inference-fairness-id": "user-17"}).cls.name == "default"


def test_without_keys_the_local_user_may_do_everything(connect: Connect, driver: FakeDriver) -> None:
    client = connect("classes: {fast: {ttft_ms: 100}}")
    headers = {
        "x-llm-d-inference-fairness-id": "me",
        "x-llm-d-inference-objective": "fast",
        "x-slo-ttft-ms": "50",
    }
    response = client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert response.headers["x-kaiseki-slo"] == "class=fast; ttft_ms=50"
    assert driver.requests[-1].tenant == "me"
    assert code(client, "/kaiseki/v1/state") == (200, None)


def test_without_keys_strangers_may_only_generate(connect: Connect, driver: FakeDriver) -> None:
    client = connect("server: {host: 0.0.0.0}")
    headers = {"x-llm-d-inference-fairness-id": "me"}
    assert client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    assert driver.requests[-1].tenant == "default"
    assert code(client, "/kaiseki/v1/state") == (401, "no_api_keys")
    assert code(client, "/kaiseki/v1/requests/x") == (401, "no_api_keys")


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host: str, local: bool) -> None:
    assert Directory(Settings(), host).caller({}).operator is local


def test_classes(ask: Any, connect: Connect) -> None:
    objective = "x-llm-d-inference-objective"
    assert ask("acme-1").cls.name == "interactive"
    assert ask("labs").cls.name == "batch"
    assert ask("acme-1", {objective: "batch"}).cls.name == "batch"  # looser in every respect
    assert ask("labs", {"x-gateway-inference-objective": "standard"}).cls.name == "standard"  # listed
    assert ask("gate", {objective: "interactive"}).cls.name == "interactive"
    client = connect(KEYS, key="labs")
    response = client.post("/v1/chat/completions", json=CHAT, headers={objective: "interactive"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "class_not_allowed")
    assert "'standard'" in response.json()["error"]["message"]
    response = client.post("/v1/chat/completions", json=CHAT, headers={objective: "quick"})
    assert response.status_code == 400
    assert "interactive, standard, batch" in response.json()["error"]["message"]


def test_targets(ask: Any, connect: Connect) -> None:
    def targets(request: Request) -> tuple[float | None, float | None]:
        return tuple(None if ns is None else ns / 1e6 for ns in (request.cls.ttft_ns, request.cls.tbt_ns))  # type: ignore[return-value]

    ttft, tbt = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
    assert targets(ask("acme-1", {ttft: "900", tbt: "100"})) == (900, 100)
    assert targets(ask("acme-1", {"x-slo-ttft-ms": "900", "x-slo-tpot-ms": "100"})) == (900, 100)
    assert targets(ask("acme-1", {ttft: "10", tbt: "1"})) == (500, 60)  # no tighter than the class
    assert targets(ask("gate", {ttft: "10", tbt: "1.5"})) == (10, 1.5)  # a gateway may
    assert targets(ask("labs", {ttft: "10"})) == (None, None)  # its class promises no TTFT
    assert targets(ask("gate", {ttft: "487", tbt: "99.9"})) == (480, 99)  # two significant digits
    client = connect(KEYS, key="acme-1")
    for wrong in ("0", "-5", "soon", "nan", "inf", "1e400"):
        response = client.post("/v1/chat/completions", json=CHAT, headers={ttft: wrong})
        assert response.status_code == 400, wrong
        assert response.json()["error"]["param"] == ttft


def test_both_polarities_mean_urgent(ask: Any) -> None:
    by_body = ask("acme-1", priority=0)
    by_hint = ask("acme-1", nvext={"agent_hints": {"priority": 10}})
    silent = ask("acme-1")
    assert by_body.priority == by_hint.priority < silent.priority
    assert ask("acme-1", priority=10).priority == silent.priority
    assert ask("acme-1", nvext={"agent_hints": {"priority": 0}}).priority == silent.priority
    assert ask("acme-1", priority=20).priority > silent.priority
    assert ask("acme-1", nvext={"agent_hints": {"priority": -5}}).priority > silent.priority
    both = ask("acme-1", priority=0, nvext={"agent_hints": {"priority": -100}})
    assert both.priority == by_body.priority


def test_priority_stays_within_the_class_unless_trusted() -> None:
    classes = parse(KEYS).service_classes()
    least, most = offset(-(10**9), None, False), offset(10**9, None, False)
    assert (least, most) == (-MAX_OFFSET, MAX_OFFSET)
    assert classes["interactive"].tier + most < classes["standard"].tier + least
    assert classes["standard"].tier + offset(-1000, None, True) < classes["interactive"].tier
