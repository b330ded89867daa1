"""The whole stack on a tiny model with random weights, over HTTP: nothing that goes wrong may leak."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.served import CONTEXT, POOL, Served, config_for, serving, until


@pytest.fixture(scope="module")
def config(folder: Path) -> str:
    return config_for(folder)


@pytest.fixture(scope="module")
def running(config: str) -> Iterator[Served]:
    with serving(config) as served:
        yield served


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    """The server; afterwards nothing may be left of any request."""
    yield running
    until(running.idle)


def test_answers_are_the_same_whole_and_streamed(served: Served) -> None:
    client = served.openai()
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**ask)
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0  # the first call left its prefix


def test_n_seed_logprobs_and_stop(served: Served) -> None:
    client = served.openai()
    ask: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 16, "seed": 5, "n": 2}
    first = client.completions.create(**ask, logprobs=2)
    again = client.completions.create(**ask)
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert first.choices[0].text != first.choices[1].text
    logprobs = first.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.top_logprobs)
    assert all(value <= 0 for value in logprobs.token_logprobs)
    text = first.choices[0].text
    stop = text[3]
    stopped = client.completions.create(**ask | {"n": 1}, stop=[stop])
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_what_can_never_fit(served: Served) -> None:
    long = served.post({"model": "tiny", "prompt": "x" * 4100, "max_tokens": 5})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "too_long")
    assert "4105" in long.json()["error"]["message"]
    assert str(CONTEXT) in long.json()["error"]["message"]
    for stream in (False, True):
        never = served.post({"model": "tiny", "prompt": "x" * 2000, "max_tokens": 1001, "stream": stream})
        assert (never.status_code, never.headers["x-kaiseki-reason"]) == (400, "never_fits")
        assert "3001" in never.json()["error"]["message"]
        assert str(POOL) in never.json()["error"]["message"]
    assert served.post({"model": "tiny", "prompt": "x" * 2960, "max_tokens": 40}).status_code == 200


def test_wrong_requests(served: Served) -> None:
    good = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    assert served.post(good).status_code == 200
    assert served.post(b"{").status_code == 400
    assert served.post(good | {"max_tokens": "two"}).status_code == 400
    assert served.post(good | {"model": "other"}).status_code == 404
    assert served.post(good, key="nope").status_code == 401
    assert served.post(good | {"response_format": {"type": "json_object"}}).status_code == 400


def test_a_client_that_hangs_up_frees_its_blocks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # Slow enough that the client, which shares the interpreter, hangs up long before the end.
    engine, execute = served.stack.engine, served.stack.engine.execute
    monkeypatch.setattr(engine, "execute", lambda decision: (time.sleep(0.005), execute(decision))[1])
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2900, "ignore_eos": True}
    url = f"{served.url}/v1/completions"
    headers = {"authorization": "Bearer acme"}
    with httpx.stream("POST", url, json=body | {"stream": True}, headers=headers, timeout=60) as response:
        lines = response.iter_lines()  # kept: a forgotten iterator closes the connection
        next(lines)
        assert not served.idle()
    until(served.idle)
    request_id = response.headers["x-kaiseki-request-id"]
    document = served.get(f"/kaiseki/v1/requests/{request_id}").json()
    assert document["outcome"] == "cancelled"


def test_a_crowd_of_which_many_hang_up(served: Served) -> None:
    """Streams and whole answers, forks too; each client leaves after a time of its own."""
    rng = random.Random(4)
    asks = [
        (
            {
                "model": "tiny",
                "prompt": "w" * rng.randint(1, 300),
                "max_tokens": rng.randint(1, 150),
                "n": rng.choice((1, 1, 2, 3)),
                "stream": rng.random() < 0.5,
                "ignore_eos": True,
            },
            rng.choice((0.02, 0.1, 0.3, 60.0)),
        )
        for _ in range(32)
    ]
    statuses: list[int] = []

    def one(body: dict[str, Any], patience_s: float) -> None:
        try:
            statuses.append(served.post(body, timeout=patience_s).status_code)
        except httpx.TimeoutException:
            statuses.append(0)

    threads = [threading.Thread(target=one, args=ask) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(statuses) == len(asks)
    assert set(statuses) <= {0, 200, 429}
    assert 200 in statuses


def test_those_who_come_too_late_are_told_before_any_work(served: Served) -> None:
    before = served.stack.driver.metrics.totals[0]
    for stream in (False, True):
        body = {"model": "tiny", "prompt": "fresh words", "max_tokens": 5, "stream": stream}
        answer = served.post(body, **{"x-llm-d-inference-objective": "hurried"})
        assert answer.status_code == 503
        assert answer.headers["x-kaiseki-reason"] in ("expired", "hopeless")
    assert served.stack.driver.metrics.totals[0] == before


def test_a_burst_fills_the_queue_and_no_more(served: Served) -> None:
    body = {"model": "tiny", "prompt": "y" * 400, "max_tokens": 20, "ignore_eos": True}
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(served.post(body))) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    statuses = sorted({a.status_code for a in answers})
    assert len(answers) == 30
    assert statuses == [200, 429]
    refused = next(a for a in answers if a.status_code == 429)
    assert refused.headers["x-kaiseki-reason"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1


def test_explanations_are_for_those_they_concern(served: Served) -> None:
    request_id = served.post({"model": "tiny", "prompt": "why", "max_tokens": 3}).headers[
        "x-kaiseki-request-id"
    ]
    path = f"/kaiseki/v1/requests/{request_id}"
    document = served.get(path, "acme").json()
    assert (document["request"], document["tenant"]) == (request_id, "acme")
    assert document["summary"]
    assert served.get(path, "boss").status_code == 200
    assert served.get(path, "labs").status_code == 404
    listed = served.get("/kaiseki/v1/requests?limit=5", "labs").json()["requests"]
    assert all(entry["tenant"] == "labs" for entry in listed)


def test_priorities_of_both_kinds_reach_the_scheduler(served: Served) -> None:
    def priority(**extra: Any) -> int:
        answer = served.post({"model": "tiny", "prompt": "z", "max_tokens": 3} | extra)
        story = served.stack.driver.history.story(answer.headers["x-kaiseki-request-id"])
        assert story is not None
        return story.request.priority

    assert priority(priority=0) == priority(nvext={"agent_hints": {"priority": 10}}) < priority()


def test_metrics_agree_with_what_was_served(served: Served) -> None:
    def read() -> dict[str, float]:
        families = text_string_to_metric_families(served.get("/metrics").text)
        return {s.name: s.value for f in families for s in f.samples if s.name.startswith("vllm:")}

    before = read()
    served.post({"model": "tiny", "prompt": "count me", "max_tokens": 7, "ignore_eos": True})
    until(served.idle)
    after = read()
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 7
    ttft = "vllm:time_to_first_token_seconds_count"
    assert after[ttft] - before[ttft] == 1
    gaps = "vllm:inter_token_latency_seconds_count"
    assert after[gaps] - before[gaps] == 6
    assert served.get("/health").status_code == 200


@pytest.mark.slow
def test_kaiseki_serve_and_explain(config: str, tmp_path: Path) -> None:
    """The commands themselves: one line when ready, drain on SIGTERM, exit 0."""
    path = tmp_path / "kaiseki.yaml"
    path.write_text(config.replace("own_process: false", "own_process: true"))
    kaiseki = str(Path(sys.executable).with_name("kaiseki"))
    command = [kaiseki, "serve", "--config", str(path), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("Kaiseki serves at http://127.0.0.1:"), server.stderr and server.stderr.read()
        url = line.split()[-1]
        headers = {"authorization": "Bearer acme"}
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 150, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            request_id = response.headers["x-kaiseki-request-id"]
            explain = [kaiseki, "explain", request_id, "--url", url, "--key", "acme"]
            told = subprocess.run([*explain, "--json"], capture_output=True, text=True, check=True)
            assert json.loads(told.stdout)["request"] == request_id
            server.send_signal(signal.SIGTERM)
            assert "".join(lines).endswith("data: [DONE]")
        rest, errors = server.communicate(timeout=30)
        assert (server.returncode, rest) == (0, ""), errors
        assert "Traceback" not in errors
    finally:
        server.kill()
        server.wait()
