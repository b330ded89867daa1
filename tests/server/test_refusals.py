"""What can't be done gets the right status, names the field, and looks the same streaming or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tests.server.fakes import Connect, FakeDriver, FakeModel, Health, ends, hang

from kaiseki.core.reasons import Finish, Outcome, Reason

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 5}


def refused(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-kaiseki-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers.get("x-kaiseki-reason") == error["code"]
    return error


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"max_tokens": "ten"}, "max_tokens", "'ten'"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 2.5}, "max_tokens", "2.5"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "True"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"n": 0}, "n", "greater"),
        ({"n": 1000}, "n", "at most 64"),
        ({"stop": 5}, "stop", "list"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"seed": "x"}, "seed", "integer"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"min_tokens": 6}, "min_tokens", "max_tokens (5)"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "system, developer, user"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "text"),
        ({"messages": [{"role": "user", "content": "no template"}]}, "messages", "must alternate"),
        ({"model": 5}, "model", "string"),
        ({"priority": "high"}, "priority", "integer"),
        ({"nvext": {"agent_hints": {"priority": "x"}}}, "nvext.agent_hints.priority", "integer"),
    ],
)
def test_wrong_values(client: TestClient, change: dict[str, Any], param: str, says: str) -> None:
    error = refused(client.post("/v1/chat/completions", json=CHAT | change), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("logit_bias", {"5": -100}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("guided_json", {"type": "object"}),
        ("echo", True),
        ("use_beam_search", True),
    ],
)
def test_what_would_change_the_answer_is_named(client: TestClient, field: str, value: Any) -> None:
    error = refused(client.post("/v1/chat/completions", json=CHAT | {field: value}), 400)
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert field in error["message"]
    assert "not supported" in error["message"]


def test_content_that_is_no_text(client: TestClient) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    for message, param in (
        ({"role": "user", "content": image}, "messages[0].content[0]"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls"),
    ):
        error = refused(client.post("/v1/chat/completions", json=CHAT | {"messages": [message]}), 400)
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    "prompt", [5, None, [], [[]], [["a"]], {"a": 1}, [1, "a"], [True], [300], "", [[1], [-1]]]
)
def test_prompts_that_are_none(client: TestClient, prompt: Any) -> None:
    error = refused(client.post("/v1/completions", json=TEXT | {"prompt": prompt}), 400)
    assert error["param"] == "prompt"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'"x"', b"\xff\xfe", b"null"])
def test_bodies_that_are_no_json_object(client: TestClient, body: bytes) -> None:
    error = refused(client.post("/v1/chat/completions", content=body), 400)
    assert error["code"] == "invalid_json"


def test_missing_fields(client: TestClient) -> None:
    assert refused(client.post("/v1/completions", json={"model": "tiny"}), 400)["param"] == "prompt"
    assert refused(client.post("/v1/chat/completions", json={"model": "tiny"}), 400)["param"] == "messages"
    assert refused(client.post("/v1/completions", json={"prompt": "x"}), 400)["param"] == "model"


def test_unknown_model_and_routes(client: TestClient) -> None:
    error = refused(client.post("/v1/chat/completions", json=CHAT | {"model": "gpt-9"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-9'" in error["message"]
    assert "'tiny'" in error["message"]
    refused(client.get("/v1/models/gpt-9"), 404)
    refused(client.get("/v1/nothing"), 404)
    assert client.get("/v1/chat/completions").status_code == 405


def test_a_body_that_is_too_large(connect: Connect) -> None:
    client = connect("server: {max_body_bytes: 2000}")
    refused(client.post("/v1/completions", json=TEXT | {"prompt": "x" * 3000}), 413)
    chunks = iter([b"{" + b" " * 1500, b" " * 1500])
    refused(client.post("/v1/completions", content=chunks), 413)


def test_a_failure_that_is_nobodys_but_ours(client: TestClient, driver: FakeDriver) -> None:
    driver.script = ends(Outcome.FAILED, Reason.NONE)
    assert refused(client.post("/v1/completions", json=TEXT), 500)["code"] == "internal_error"


NEVER_FITS = {"tokens": 105, "pool_tokens": 64, "need_blocks": 7, "pool_blocks": 4}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("outcome", "reason", "more", "status", "code"),
    [
        (Outcome.REFUSED, Reason.NEVER_FITS, {"numbers": NEVER_FITS}, 400, "never_fits"),
        (Outcome.REFUSED, Reason.TOO_LONG, {"numbers": {"tokens": 9}}, 400, "too_long"),
        (Outcome.REFUSED, Reason.QUEUE_FULL, {"retry_after_s": 2.4}, 429, "queue_full"),
        (Outcome.REFUSED, Reason.DRAINING, {}, 503, "draining"),
        (Outcome.REFUSED, Reason.HOPELESS, {}, 503, "hopeless"),
        (Outcome.EXPIRED, Reason.HOPELESS, {"retry_after_s": 7}, 503, "expired"),
        (Outcome.FAILED, Reason.ENGINE_ERROR, {"numbers": {"attempts": 3}}, 500, "engine_error"),
    ],
)
def test_endings_before_the_first_token_have_a_status(
    client: TestClient,
    driver: FakeDriver,
    outcome: Outcome,
    reason: Reason,
    more: dict[str, Any],
    status: int,
    code: str,
    stream: bool,
) -> None:
    driver.script = ends(outcome, reason, **more)
    response = client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    error = refused(response, status)
    assert error["code"] == code
    assert reason.sentence in error["message"]
    for name, value in more.get("numbers", {}).items():
        assert f"{name} = {value}" in error["message"]
    retry = more.get("retry_after_s")
    assert response.headers.get("retry-after") == (None if retry is None else {2.4: "3", 7: "7"}[retry])
    refused_for_good = outcome is Outcome.REFUSED and reason is Reason.HOPELESS
    assert response.headers.get("x-should-retry") == ("false" if refused_for_good else None)


def test_nobody_gets_a_token_marked_length_of_a_request_that_expired(
    client: TestClient, driver: FakeDriver
) -> None:
    driver.script = ends(Outcome.EXPIRED, Reason.LATE_GAPS, after=2, finish=Finish.NONE)
    refused(client.post("/v1/chat/completions", json=CHAT), 503)
    response = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    events = [json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n")[:-2]]
    *tokens, last = events
    assert last["error"]["code"] == "expired"
    assert all(e["choices"][0]["finish_reason"] is None for e in tokens)
    assert response.text.endswith("data: [DONE]\n\n")


def test_a_refused_choice_takes_its_siblings_with_it(client: TestClient, driver: FakeDriver) -> None:
    def script(driver: FakeDriver, request: Any, work: Any, sink: Any) -> None:
        if request.fork_of is None:
            hang(driver, request, work, sink)
        else:
            ends(Outcome.REFUSED, Reason.QUEUE_FULL)(driver, request, work, sink)

    driver.script = script
    refused(client.post("/v1/chat/completions", json=CHAT | {"n": 2}), 429)
    assert driver.requests[0].id in driver.cancelled


def test_a_full_queue_refuses_before_tokenising(
    connect: Connect, driver: FakeDriver, model: FakeModel
) -> None:
    client = connect("scheduling: {max_waiting_tokens: 1000, max_waiting: 10}")
    driver.waiting = (3, 900)
    client.post("/v1/completions", json=TEXT | {"prompt": "x" * 200})
    assert model.encoded == 1
    response = client.post("/v1/completions", json=TEXT | {"prompt": "x" * 2000})
    error = refused(response, 429)
    assert error["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1
    driver.waiting = (9, 0)
    refused(client.post("/v1/chat/completions", json=CHAT | {"n": 2}), 429)
    assert model.encoded == 1
    assert len(driver.requests) == 1
    samples = {
        (s.name, s.labels.get("reason")): s.value
        for f in text_string_to_metric_families(client.get("/metrics").text)
        for s in f.samples
    }
    assert samples["kaiseki_refusals_total", "queue_full"] == 2


def test_nothing_is_taken_while_no_progress_is_made(client: TestClient, driver: FakeDriver) -> None:
    driver.healthy = Health(False, "RuntimeError: the engine is gone", "no_progress")
    error = refused(client.post("/v1/completions", json=TEXT), 503)
    assert error["code"] == "no_progress"
    assert "the engine is gone" in error["message"]
    assert driver.requests == []


def test_a_bug_is_no_traceback_for_the_client(client: TestClient, model: FakeModel) -> None:
    def broken(text: str) -> list[int]:
        raise KeyError("secret prompt")

    model.encode = broken  # type: ignore[method-assign]
    error = refused(client.post("/v1/completions", json=TEXT), 500)
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
