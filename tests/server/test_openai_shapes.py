"""Answers have OpenAI's shapes, whole and as a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.server.fakes import FakeDriver, FakeModel

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 5}


def chat(client: TestClient, **more: Any) -> Any:
    response = client.post("/v1/chat/completions", json=CHAT | more)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, url: str, body: dict[str, Any]) -> list[Any]:
    response = client.post(url, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_chat(client: TestClient, driver: FakeDriver) -> None:
    response = client.post("/v1/chat/completions", json=CHAT)
    document = response.json()
    assert document["object"] == "chat.completion"
    assert document["model"] == "tiny"
    assert document["id"] == f"chatcmpl-{response.headers['x-kaiseki-request-id']}"
    assert document["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abcde", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert document["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    (request,) = driver.requests
    assert request.id == response.headers["x-kaiseki-request-id"]
    assert (request.prompt_tokens, request.max_tokens, request.tenant) == (5, 5, "default")


def test_chat_stream(client: TestClient) -> None:
    events = stream(client, "/v1/chat/completions", CHAT)
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert len({e["id"] for e in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "abcde"
    reasons = [e["choices"][0]["finish_reason"] for e in events]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert not any("usage" in e for e in events)


def test_stream_usage_comes_last_without_choices(client: TestClient) -> None:
    events = stream(client, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert all(e["usage"] is None for e in events[:-1])


def test_n_choices_are_forks_of_the_first(client: TestClient, driver: FakeDriver) -> None:
    document = chat(client, n=3, seed=7)
    assert [c["index"] for c in document["choices"]] == [0, 1, 2]
    assert document["usage"]["prompt_tokens"] == 5
    assert document["usage"]["completion_tokens"] == 15
    first, *others = driver.requests
    assert first.fork_of is None
    assert [r.fork_of for r in others] == [first.id, first.id]
    assert [w.sampling.seed for w in driver.works] == [7, 8, 9]
    events = stream(client, "/v1/chat/completions", CHAT | {"n": 2})
    for index in (0, 1):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "abcde"
        assert mine[-1]["finish_reason"] == "length"


def test_chat_logprobs(client: TestClient) -> None:
    content = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("abcde")
    assert content[0]["bytes"] == [97]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "b"]
    events = stream(client, "/v1/chat/completions", CHAT | {"logprobs": True})
    streamed = [t for e in events if (c := e["choices"][0])["logprobs"] for t in c["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == list("abcde")


def test_stop(client: TestClient) -> None:
    choice = chat(client, stop="c")["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "stop")


def test_completions(client: TestClient) -> None:
    response = client.post("/v1/completions", json=TEXT | {"prompt": ["hello", "hi"], "n": 2, "logprobs": 2})
    document = response.json()
    assert document["object"] == "text_completion"
    assert [(c["index"], c["text"]) for c in document["choices"]] == [(i, "abcde") for i in range(4)]
    logprobs = document["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("abcde")
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["top_logprobs"][0] == {"a": -1.0, "b": -2.0}
    assert document["usage"]["prompt_tokens"] == 7


def test_completions_stream(client: TestClient) -> None:
    events = stream(client, "/v1/completions", TEXT | {"logprobs": 0})
    assert "".join(e["choices"][0]["text"] for e in events) == "abcde"
    assert [o for e in events for o in e["choices"][0]["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("abc", [3]), (["ab", "c"], [2, 1]), ([1, 2, 3], [3]), ([[1, 2], [3]], [2, 1]), (["a", [1, 2]], [1, 2])],
)
def test_forms_of_a_prompt(client: TestClient, driver: FakeDriver, prompt: Any, lengths: list[int]) -> None:
    assert client.post("/v1/completions", json=TEXT | {"prompt": prompt}).status_code == 200
    assert [r.prompt_tokens for r in driver.requests] == lengths


def test_sampling_reaches_the_engine(client: TestClient, driver: FakeDriver) -> None:
    wanted = {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 3,
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
    }
    chat(client, **wanted, stop=["x", "yz"], stop_token_ids=[5])
    sampling = driver.works[0].sampling
    assert {name: getattr(sampling, name) for name in wanted} == wanted
    assert (sampling.stop, sampling.stop_token_ids, sampling.logprobs) == (("x", "yz"), (5,), None)
    chat(client, temperature=None, top_k=-1)
    assert (driver.works[1].sampling.temperature, driver.works[1].sampling.top_k) == (1.0, 0)


def test_how_many_tokens(client: TestClient, driver: FakeDriver, model: FakeModel) -> None:
    chat(client, max_tokens=9, max_completion_tokens=4)
    chat(client, max_tokens=None)
    client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    chat(client, ignore_eos=True)
    chat(client, ignore_eos=True, stop="z")
    assert [r.max_tokens for r in driver.requests] == [4, model.max_total_tokens - 5, 16, 5, 5]
    assert [r.min_tokens for r in driver.requests] == [1, 1, 1, 5, 1]


def test_messages(client: TestClient, model: FakeModel) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat(client, messages=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}])
    assert model.chats[0] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a\nb"}]


def test_harmless_fields_are_tolerated(client: TestClient) -> None:
    chat(
        client,
        user="me",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias={},
        nvext={"something": 1},
        made_up=1,
    )


def test_models(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 128)
    assert client.get("/v1/models/tiny").json() == model


def test_the_schema_describes_the_bodies(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    post = schema["paths"]["/v1/chat/completions"]["post"]
    properties = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"messages", "temperature", "nvext"} <= set(properties)
