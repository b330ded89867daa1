"""Servers of our own: valid settings, started, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest
import yaml

from kaiseki.config import parse
from kaiseki.demo import serving
from kaiseki.demo.attainment import Targets
from kaiseki.demo.prompts import BATCH, INTERACTIVE
from kaiseki.demo.serving import ServerFailed, serve, settings, until_signalled

TARGETS = {INTERACTIVE: Targets(ttft_ms=500.0, tbt_ms=60.0), BATCH: Targets(deadline_ms=9000.0)}
READY = "import os, time; print(os.getpid(), 'serves at http://127.0.0.1:1', flush=True); time.sleep(60)"


def test_the_settings_are_valid():
    parsed = parse(yaml.safe_dump(settings("some-model", "priority", 128, TARGETS)))
    chat, batch = parsed.classes[INTERACTIVE], parsed.classes[BATCH]
    assert (chat.ttft_ms, chat.tbt_ms, chat.on_late) == (500.0, 60.0, "demote")
    assert (batch.deadline_s, batch.on_late) == (9.0, "expire")
    assert chat.tier < batch.tier
    assert sorted(tenant.weight for tenant in parsed.tenants.values()) == [1.0, 3.0]
    assert parsed.scheduling.budget_tokens == 128
    assert (
        parse(yaml.safe_dump(settings("some-model", "kaiseki", None, None))).classes[BATCH].deadline_s is None
    )


def fake(monkeypatch, code: str) -> None:
    monkeypatch.setattr(serving, "COMMAND", (sys.executable, "-c", code))


def test_started_and_stopped(monkeypatch):
    fake(monkeypatch, READY)

    async def use() -> str:
        async with serve({}) as url:
            return url

    assert asyncio.run(use()) == "http://127.0.0.1:1"


def test_a_server_that_does_not_start_says_why(monkeypatch):
    fake(monkeypatch, "import sys; sys.exit('no such model')")

    async def use() -> None:
        async with serve({}):
            raise AssertionError("it is not there")

    with pytest.raises(ServerFailed, match=r"code 1(.|\n)*no such model"):
        asyncio.run(use())


def test_nothing_is_left_when_the_user_of_a_server_fails(monkeypatch, tmp_path):
    pid_file = tmp_path / "pid"
    fake(monkeypatch, f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid())); {READY}")

    async def use() -> None:
        async with serve({}):
            raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(use())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_sigterm_ends_in_order(monkeypatch, tmp_path):
    pid_file = tmp_path / "pid"
    fake(monkeypatch, f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid())); {READY}")

    async def use() -> None:
        async with serve({}):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)

    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(until_signalled(use()))
    assert time.monotonic() - began < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
