"""The middleware in front of an application that answers as vLLM does; needs no vLLM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kaiseki.config import key_digest
from kaiseki.core.admission import Refusal
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.engines.vllm.board import Board, Mode, folder
from kaiseki.engines.vllm.middleware import KaisekiMiddleware

SETTINGS = {
    "classes": {"interactive": {"ttft_ms": 500, "tbt_ms": 60}, "batch": {"deadline_s": 600}},
    "tenants": {
        "acme": {"class": "interactive", "api_key_sha256": [key_digest("k-acme")]},
        "gate": {
            "class": "batch",
            "trusted": True,
            "operator": True,
            "api_key_sha256": [key_digest("k-gate")],
        },
    },
}


class Server:
    """vLLM's place: takes a body, answers as `reply` says."""

    def __init__(self, tmp_path: Path, settings: dict[str, Any] = SETTINGS, reply: str = "ok") -> None:
        config = SimpleNamespace(additional_config={"kaiseki": settings}, instance_id="i")
        self.state = SimpleNamespace(vllm_config=config, args=SimpleNamespace(host="0.0.0.0"))
        self.board = Board(folder("i") / "rank-0", create=True)
        self.reply = reply
        self.seen: dict[str, Any] = {}
        self.app = KaisekiMiddleware(self.serve)

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.seen = json.loads(message["body"])
        sent = dict(scope["headers"])
        assert int(sent[b"content-length"]) == len(message["body"])
        key = self.seen["vllm_xargs"]["kaiseki_key"]
        if self.reply != "ok":
            outcome = Outcome.EXPIRED if "expired" in self.reply else Outcome.REFUSED
            reason = Reason.HOPELESS if "expired" in self.reply else Reason.NEVER_FITS
            self.board.ended(key, outcome, Refusal(reason, {"tokens": 600, "pool_tokens": 512}))
        stream = "stream" in self.reply
        status = 200 if stream or self.reply == "ok" else 500
        await send({"type": "http.response.start", "status": status, "headers": []})
        if stream:
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await send({"type": "http.response.body", "body": b'data: {"error": {}}\n\n', "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        else:
            await send({"type": "http.response.body", "body": b'{"id": 1}'})

    def post(self, body: Any, key: str = "k-acme", path: str = "/v1/completions", **headers: str) -> Answer:
        return self._call("POST", path, body, {"authorization": f"Bearer {key}", **headers})

    def get(self, path: str, key: str) -> Answer:
        return self._call("GET", path, None, {"authorization": f"Bearer {key}"})

    def _call(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        raw = json.dumps(body).encode()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "app": SimpleNamespace(state=self.state),
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        }
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        return Answer(sent)


class Answer:
    def __init__(self, sent: list[dict[str, Any]]) -> None:
        assert [m["type"] for m in sent].count("http.response.start") == 1
        self.status = sent[0]["status"]
        self.headers = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        self.body = b"".join(m["body"] for m in sent[1:])


def test_headers_and_keys_become_what_the_scheduler_reads(tmp_path: Path) -> None:
    server = Server(tmp_path)
    forged = {"kaiseki_tenant": "gate", "mine": 1}
    answer = server.post({"prompt": "x", "vllm_xargs": forged}, x_llm_d_slo_ttft_ms="800")
    asked = server.seen["vllm_xargs"]
    assert asked["kaiseki_tenant"] == "acme" and asked["mine"] == 1
    assert (asked["kaiseki_class"], asked["kaiseki_ttft_ms"], asked["kaiseki_tbt_ms"]) == (
        "interactive",
        800,
        60,
    )
    assert (
        answer.status == 200
        and answer.headers["x-kaiseki-slo"] == "class=interactive; ttft_ms=800; tbt_ms=60"
    )
    server.post({"prompt": "x"}, "k-gate", x_llm_d_inference_fairness_id="acme", x_llm_d_slo_ttft_ms="100")
    asked = server.seen["vllm_xargs"]
    assert (asked["kaiseki_tenant"], asked["kaiseki_ttft_ms"]) == ("acme", 100)
    assert server.post({"prompt": "x"}, "wrong").status == 401


def test_s29_both_ways_of_saying_urgent_mean_the_same(tmp_path: Path) -> None:
    server = Server(tmp_path)
    said = []
    for body in ({"priority": 0}, {"nvext": {"agent_hints": {"priority": 10}}}, {}, {"priority": 10}):
        server.post({"prompt": "x"} | body)
        said.append(server.seen["vllm_xargs"]["kaiseki_priority"])
    assert said == [-10, -10, 0, 0]
    server.post({"prompt": "x"}, x_vllm_priority="0")
    assert server.seen["vllm_xargs"]["kaiseki_priority"] == -10
    assert server.post({"prompt": "x", "priority": "soon"}).status == 400


@pytest.mark.parametrize("how", ["", " stream"])
def test_refusals_look_the_same_streamed_or_not(tmp_path: Path, how: str) -> None:
    never = Server(tmp_path, reply="never fits" + how).post({"prompt": "x"})
    assert never.status == 400 and never.headers["x-kaiseki-reason"] == "never_fits"
    assert b"tokens = 600" in never.body and b"pool_tokens = 512" in never.body
    expired = Server(tmp_path, reply="expired" + how).post({"prompt": "x"})
    assert expired.status == 503 and expired.headers["x-kaiseki-reason"] == "expired"
    assert json.loads(expired.body)["error"]["code"] == "expired"


def test_a_full_queue_is_refused_before_the_prompt_is_read(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.board.write(max_waiting=5, waiting=5, drain_s=7.2)
    answer = server.post({"prompt": "x"})
    assert answer.status == 429 and server.seen == {}
    assert answer.headers["retry-after"] == "8" and answer.headers["x-kaiseki-reason"] == "queue_full"
    server.board.write(mode=int(Mode.VLLM))
    assert server.post({"prompt": "x"}).status == 200


def test_operators_see_the_state_and_throw_the_switch(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.board.write(running=3)
    answer = server.get("/kaiseki/v1/state", "k-gate")
    assert json.loads(answer.body)["ranks"][0]["running"] == 3
    assert server.post({"mode": "vllm"}, "k-gate", "/kaiseki/v1/mode").status == 200
    assert server.board.read("wanted") == Mode.VLLM
    assert server.post({"mode": "off"}, "k-gate", "/kaiseki/v1/mode").status == 400
    assert server.post({"mode": "vllm"}, "k-acme", "/kaiseki/v1/mode").status == 403
