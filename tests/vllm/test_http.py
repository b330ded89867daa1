"""Kaiseki in vLLM's own OpenAI server, asked by OpenAI's own client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs what needs vLLM")

import httpx
import openai

pytestmark = [pytest.mark.model, pytest.mark.slow]

SETTINGS = {
    "classes": {
        "interactive": {"ttft_ms": 60_000, "tbt_ms": 10_000, "weight": 4},
        "batch": {"deadline_s": 3600, "tier": 1},
        "impatient": {"ttft_ms": 1500, "on_late": "expire"},
    },
    "tenants": {
        "chat": {"class": "interactive"},
        "reports": {"class": "batch"},
        "hasty": {"class": "impatient"},
    },
    "scheduling": {"max_waiting": 6},
    "vllm": {"trust_headers": True},
}
BLOCKS = 22
"""Enough for vLLM, which forgets that one of them is taken: the longest requests never fit."""
ROWS = 2


class Server:
    def __init__(self, url: str, log: Path) -> None:
        self.url, self.log = url, log
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)

    def ask(self, stream: bool, tenant: str = "chat", tokens: int = 8, words: int = 5, **body: Any) -> Any:
        """What the client gets: text, or the exception it raises."""
        try:
            answer = self.client.completions.create(
                model="m",
                prompt=" ".join(f"{tenant} {i}" for i in range(words)),
                max_tokens=tokens,
                temperature=0.0,
                stream=stream,
                extra_headers={"x-llm-d-inference-fairness-id": tenant},
                extra_body={"ignore_eos": True, **body},
            )
            return "".join(part.choices[0].text for part in answer) if stream else answer.choices[0].text
        except openai.APIStatusError as error:
            return error

    def state(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/kaiseki/v1/state").json()["ranks"][0]

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        for _ in range(600):
            if holds(self.state()):
                return
            time.sleep(0.1)
        raise AssertionError(self.state())


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {
        "model": smollm2,
        "served-model-name": "m",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "block-size": 32,
        "max-model-len": 704,
        "max-num-seqs": ROWS,
        "num-gpu-blocks-override": BLOCKS,
        "max-num-batched-tokens": 128,
        "scheduler-cls": "kaiseki.engines.vllm.KaisekiScheduler",
        "middleware": "kaiseki.engines.vllm.middleware.KaisekiMiddleware",
        "additional-config": json.dumps({"kaiseki": SETTINGS}),
    }
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    log = folder / "log"
    env = os.environ | {"KAISEKI_RUN_DIR": str(folder / "run"), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *options],
            stdout=out,
            stderr=out,
            env=env,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(280):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(1)
        yield Server(url, log)
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("stream", [False, True])
def test_it_answers_and_says_what_applies(server: Server, stream: bool) -> None:
    assert isinstance(server.ask(stream), str)
    raw = httpx.post(
        f"{server.url}/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 2}, timeout=120
    )
    assert raw.headers["x-kaiseki-slo"] == "class=default" and raw.headers["x-kaiseki-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_s08_what_never_fits_is_a_400_with_both_numbers(server: Server, stream: bool) -> None:
    error = server.ask(stream, tokens=690)
    assert isinstance(error, openai.BadRequestError), error
    pool = (BLOCKS - 1) * 32
    assert (
        f"pool_tokens = {pool}" in str(error) and error.response.headers["x-kaiseki-reason"] == "never_fits"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_expires_in_the_queue_gets_a_503(server: Server, stream: bool) -> None:
    with ThreadPoolExecutor(ROWS) as pool:
        busy = [pool.submit(server.ask, True, "chat", 150) for _ in range(ROWS)]
        server.until(lambda state: state["running"] == ROWS)
        error = server.ask(stream, "hasty")
        assert isinstance(error, openai.InternalServerError), error
        assert error.status_code == 503 and error.code == "expired"
        assert error.response.headers["x-kaiseki-reason"] == "expired"
        assert all(isinstance(one.result(), str) for one in busy)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_with_retry_after(server: Server, stream: bool) -> None:
    with ThreadPoolExecutor(16) as pool:
        busy = [pool.submit(server.ask, True, "reports", 120) for _ in range(ROWS + 6)]
        server.until(lambda state: state["waiting"] >= 6)
        error = server.ask(stream, "chat")
        assert isinstance(error, openai.RateLimitError), error
        assert int(error.response.headers["retry-after"]) >= 1 and error.code == "queue_full"
        assert all(isinstance(one.result(), str) for one in busy)


def test_s29_both_polarities_go_before_silence(server: Server) -> None:
    ended: dict[str, float] = {}

    def ask(name: str, **body: Any) -> None:
        assert isinstance(server.ask(True, "chat", 6, **body), str)
        ended[name] = time.monotonic()

    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(server.ask, True, "chat", 60) for _ in range(ROWS)]
        server.until(lambda state: state["running"] == ROWS)
        waiting = [pool.submit(ask, f"silent{i}") for i in range(2)]
        server.until(lambda state: state["waiting"] == 2)
        waiting.append(pool.submit(ask, "lower", priority=0))
        waiting.append(pool.submit(ask, "higher", nvext={"agent_hints": {"priority": 10}}))
        for one in (*busy, *waiting):
            one.result()
    assert max(ended["lower"], ended["higher"]) < min(ended["silent0"], ended["silent1"])


def test_the_kill_switch_loses_nobody(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(server.ask, True, "chat", 80) for _ in range(5)]
        server.until(lambda state: state["running"] == ROWS)
        for mode in ("vllm", "kaiseki"):
            answer = httpx.post(f"{server.url}/kaiseki/v1/mode", json={"mode": mode})
            assert answer.status_code == 200
            server.until(lambda state, mode=mode: state["mode"] == mode)
        assert len({one.result() for one in busy}) == 1
    assert "steps aside" not in server.log.read_text()
