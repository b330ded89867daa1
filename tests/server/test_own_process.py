"""The engine in a process of its own behind HTTP, and what clients get when that process is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import httpx
from tests.server.served import GENEROUS_S, config_for, serving, until

from kaiseki.config import parse
from kaiseki.engines.embedded import ProcessEngine

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 2500, "ignore_eos": True}


def test_it_is_the_default() -> None:
    assert parse("").engine.own_process
    assert not parse("engine: {own_process: false}").engine.own_process


def test_everybody_gets_an_answer_when_the_engine_is_killed(folder: Path) -> None:
    with serving(config_for(folder).replace("own_process: false", "own_process: true")) as served:
        engine = served.stack.engine
        assert isinstance(engine, ProcessEngine)
        short = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0}
        assert served.post(short).status_code == 200
        assert served.get("/health").status_code == 200

        answers: list[httpx.Response] = []
        whole = threading.Thread(target=lambda: answers.append(served.post(LONG)))
        whole.start()
        headers = {"authorization": "Bearer labs"}
        url = f"{served.url}/v1/completions"
        with httpx.stream("POST", url, json=LONG | {"stream": True}, headers=headers, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            until(lambda: served.stack.driver.snapshot()["running"] == 2)
            os.kill(engine.pid, signal.SIGKILL)
            told = [line.removeprefix("data: ") for line in lines if line]
        whole.join(GENEROUS_S)
        assert told[-1] == "[DONE]"
        assert "error" in json.loads(told[-2])
        assert [answer.status_code for answer in answers] == [500]
        assert answers[0].headers["x-kaiseki-reason"] == "engine_error"

        health = served.get("/health")
        assert health.status_code == 503
        assert health.json()["reason"] == "EngineDied: the engine's process was killed by SIGKILL"
        assert served.post(short).status_code == 503
