"""Reading streams as the server sends them, and requests that go wrong."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from kaiseki.demo.client import Exchange


def chunk(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(t_ms: float, n: int = 1, demoted: bool = False, finish: str | None = None) -> bytes:
    stamp = {"t_ms": t_ms, "arrival_ms": 100.0, "tokens": n, "demoted": demoted}
    return chunk(choices=[{"delta": {"content": "a"}, "finish_reason": finish}], kaiseki=stamp)


async def pieces(body: bytes):
    """As a network might cut it."""
    for start in range(0, len(body), 50):
        yield body[start : start + 50]


def answer_to(prompt, *, status: int = 200, body: bytes = b"", breaks: bool = False):
    def respond(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        assert (asked["min_tokens"], asked["ignore_eos"], asked["stream"]) == (4, True, True)
        if breaks:
            raise httpx.ReadError("gone")
        return httpx.Response(status, content=pieces(body), headers={"x-kaiseki-request-id": "r1"})

    async def ask():
        transport = httpx.MockTransport(respond)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            exchange = Exchange(prompt)
            await exchange.run(client, "tiny")
            return exchange.answer()

    return asyncio.run(ask())


def test_a_whole_stream(prompt):
    head = chunk(choices=[{"delta": {"role": "assistant"}, "finish_reason": None}])
    body = head + token(150) + token(160, n=2) + token(180, finish="length") + b"data: [DONE]\n\n"
    answer = answer_to(prompt(), body=body)
    assert (answer.request_id, answer.finished, answer.demoted, answer.error) == ("r1", True, False, "")
    assert answer.ttft_ms == 50.0
    assert answer.e2e_ms == 80.0
    assert answer.gaps_ms.tolist() == [10.0, 0.0, 20.0]


def test_a_stream_that_was_cut_within_an_event(prompt):
    answer = answer_to(prompt(), body=token(150) + token(160)[:-10])
    assert not answer.finished
    assert answer.token_ms.tolist() == [150.0]


def test_a_stream_that_ends_in_an_error(prompt):
    body = token(150) + chunk(error={"code": "expired"}) + b"data: [DONE]\n\n"
    answer = answer_to(prompt(), body=body)
    assert (answer.finished, answer.error) == (False, "expired")


def test_demotion_is_noticed(prompt):
    body = token(150) + token(160, demoted=True, finish="length")
    assert answer_to(prompt(), body=body).demoted


@pytest.mark.parametrize(
    ("body", "code"), [(b'{"error": {"code": "expired"}}', "expired"), (b"Bad Gateway", "http_503")]
)
def test_a_refusal(prompt, body, code):
    answer = answer_to(prompt(), status=503, body=body)
    assert (answer.status, answer.error, answer.token_ms.size) == (503, code, 0)
    assert answer.ttft_ms != answer.ttft_ms


def test_a_connection_that_breaks(prompt):
    answer = answer_to(prompt(), breaks=True)
    assert (answer.status, answer.finished) == (0, False)
