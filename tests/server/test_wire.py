"""Over a real socket: the openai client, clients that hang up, and an orderly end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
from tests.server.fakes import FakeDriver, FakeModel, ends, hang

from kaiseki.config import Settings, parse
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.server.app import create_app
from kaiseki.server.run import DrainingServer, bind, url_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}


@dataclass
class Running:
    """A server on a thread of its own."""

    server: DrainingServer
    thread: threading.Thread
    url: str
    loop: asyncio.AbstractEventLoop

    def drain(self) -> None:
        self.loop.call_soon_threadsafe(self.server.begin_drain)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=20)


@pytest.fixture
def run(driver: FakeDriver, model: FakeModel) -> Iterator[Callable[..., Running]]:
    """A function that serves on a free port of the loopback address."""
    running: list[Running] = []

    def start(yaml: str = "") -> Running:
        settings = parse(yaml) if yaml else Settings()
        listener = bind("127.0.0.1", 0)
        ready: list[asyncio.AbstractEventLoop] = []
        app = create_app(driver, model, settings, driver.backlog)
        server = DrainingServer(
            app, settings.server.drain_s, lambda: ready.append(asyncio.get_running_loop())
        )
        url = url_of(listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until(lambda: bool(ready))
        running.append(Running(server, thread, url, ready[0]))
        return running[-1]

    yield start
    for it in running:
        it.server.should_exit = True
        it.thread.join(10)
        assert not it.thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_the_openai_client(run: Callable[..., Running], driver: FakeDriver) -> None:
    client = run().openai()
    messages = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, n=2, seed=1, logprobs=True, top_logprobs=1, stop=["d"]
    )
    assert [c.message.content for c in answer.choices] == ["abc", "abc"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "a"
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "abcd"
    assert chunks[-1].usage.completion_tokens == 4
    text = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2, logprobs=1)
    assert [c.text for c in text.choices] == ["ab", "ab"]
    assert [m.id for m in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="tiny", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model="tiny", messages=messages, response_format={"type": "json_object"}
        )


def test_the_openai_client_sees_a_failure_in_mid_stream(
    run: Callable[..., Running], driver: FakeDriver
) -> None:
    driver.script = ends(Outcome.FAILED, Reason.ENGINE_ERROR, after=2)
    driver.pause_s = 0.05
    with pytest.raises(openai.APIError, match="engine"):
        list(run().openai().chat.completions.create(**CHAT, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_while_it_waits(
    run: Callable[..., Running], driver: FakeDriver, stream: bool
) -> None:
    driver.script = hang
    url = run().url
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": stream, "n": 2}, timeout=0.3)
    until(lambda: len(driver.cancelled) == 2)
    assert driver.open == 0
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_client_that_hangs_up_in_mid_stream(run: Callable[..., Running], driver: FakeDriver) -> None:
    driver.pause_s = 0.02
    running = run()
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        lines = response.iter_lines()
        assert "role" in next(lines)
        assert response.headers["x-kaiseki-request-id"] == driver.requests[0].id
    until(lambda: driver.cancelled == [driver.requests[0].id])
    until(lambda: driver.open == 0)


def test_a_client_that_resets_the_connection(run: Callable[..., Running], driver: FakeDriver) -> None:
    driver.script = hang
    url = httpx.URL(run().url)
    body = b'{"model": "tiny", "prompt": "x"}'
    with socket.create_connection((url.host, url.port)) as raw:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        raw.sendall(head + body)
        until(lambda: driver.open == 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    until(lambda: driver.open == 0)
    assert len(driver.cancelled) == 1


def test_draining_lets_open_requests_finish_and_refuses_new_ones(
    run: Callable[..., Running], driver: FakeDriver
) -> None:
    driver.pause_s = 0.02
    running = run()
    with (
        httpx.Client(base_url=running.url, timeout=20) as client,
        httpx.Client() as other,
        client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        running.drain()
        until(lambda: other.get(f"{running.url}/health").status_code == 503)
        refused = other.post(f"{running.url}/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.headers["x-kaiseki-reason"]) == (503, "draining")
        rest = "".join(lines)
    assert rest.endswith("data: [DONE]")
    assert '"finish_reason":"length"' in rest
    running.thread.join(10)
    assert not running.thread.is_alive()
    assert driver.cancelled == []


def test_draining_has_an_end(run: Callable[..., Running], driver: FakeDriver) -> None:
    driver.script = hang
    running = run("server: {drain_s: 0.2}")
    answers: list[httpx.Response] = []
    sender = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{running.url}/v1/chat/completions", json=CHAT, timeout=20))
    )
    sender.start()
    until(lambda: driver.open == 1)
    running.drain()
    running.thread.join(10)
    sender.join(10)
    assert not running.thread.is_alive()
    assert answers[0].status_code == 503


def test_many_streams_at_once(run: Callable[..., Running], driver: FakeDriver) -> None:
    driver.pause_s = 0.01
    running = run()
    client = running.openai()
    texts: list[str] = []

    def one() -> None:
        chunks = client.chat.completions.create(**CHAT, stream=True)
        texts.append("".join(c.choices[0].delta.content or "" for c in chunks))

    threads = [threading.Thread(target=one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(texts) == {"".join(chr(97 + i % 26) for i in range(50))}
    assert len(texts) == 16


def test_an_address_in_use_is_told_at_once() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(OSError):
            bind("127.0.0.1", first.getsockname()[1])
