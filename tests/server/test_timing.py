"""Times of emission in the stream, for clients that ask for them."""

from __future__ import annotations

import json

import pytest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True}
TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "stream": True}


def stamps(response):
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [document["kaiseki"] for document in map(json.loads, lines) if "kaiseki" in document]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_every_token_has_its_time(client, path, body):
    found = stamps(client.post(path, json=body, headers={"x-kaiseki-timing": "1"}))
    assert sum(stamp["tokens"] for stamp in found) == 5
    times = [stamp["t_ms"] for stamp in found]
    assert times == sorted(times)
    assert {stamp["arrival_ms"] for stamp in found} == {found[0]["arrival_ms"]}
    assert found[0]["arrival_ms"] <= times[0]
    assert not any(stamp["demoted"] for stamp in found)


def test_a_token_without_text_has_its_time_too(client):
    body = TEXT | {"stop": ["c"]}
    assert len(stamps(client.post("/v1/completions", json=body, headers={"x-kaiseki-timing": "1"}))) == 3


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_no_times_for_those_who_do_not_ask(client, path, body):
    assert "kaiseki" not in client.post(path, json=body).text.replace("x-kaiseki", "")
