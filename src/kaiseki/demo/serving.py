"""A `kaiseki serve` of our own: started on a free port, stopped whatever happens."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kaiseki.config import key_digest
from kaiseki.demo.attainment import Targets
from kaiseki.demo.prompts import BATCH, INTERACTIVE

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
TAIL_LINES = 20

KEYS = {INTERACTIVE: "demo-key-of-the-chat-tenant", BATCH: "demo-key-of-the-reports-tenant"}
"""API keys of the two tenants, by the class they use; the server listens on the loopback address only."""
TENANTS = {INTERACTIVE: ("chat", 3.0), BATCH: ("reports", 1.0)}
CLASS_TRAITS: dict[str, dict[str, Any]] = {
    INTERACTIVE: {"weight": 4.0, "on_late": "demote", "tier": 0},
    BATCH: {"weight": 1.0, "on_late": "expire", "tier": 1},
}
ENGINE = {"dtype": "float32", "threads": 2}
POOL_TOKENS = 16384
QUANTUM_TOKENS = 8
"""A prompt token takes milliseconds on a CPU, so the finest quantum is fine enough."""
COMMAND = (sys.executable, "-c", "from kaiseki.cli import app; app()")
"""`kaiseki` with the Python that runs this."""

Launch = Callable[[Mapping[str, Any]], AbstractAsyncContextManager[str]]
"""Starts a server with these settings and gives its URL."""
T = TypeVar("T")


class ServerFailed(RuntimeError):
    """The server ended, or was not ready in time; the message has the end of its log."""


def settings(
    model: str, policy: str, budget: int | None, targets: Mapping[str, Targets] | None
) -> dict[str, Any]:
    """The settings of a run, as in a YAML file; without targets the classes promise nothing."""
    scheduling: dict[str, Any] = {"policy": policy, "quantum_tokens": QUANTUM_TOKENS}
    if budget is not None:
        scheduling["budget_tokens"] = budget
    classes = {cls: traits | _limits((targets or {}).get(cls)) for cls, traits in CLASS_TRAITS.items()}
    tenants = {
        name: {"weight": weight, "class": cls, "api_key_sha256": [key_digest(KEYS[cls])]}
        for cls, (name, weight) in TENANTS.items()
    }
    return {
        "engine": {"model": model, **ENGINE},
        "memory": {"pool_tokens": POOL_TOKENS},
        "scheduling": scheduling,
        "classes": classes,
        "tenants": tenants,
        "server": {"host": "127.0.0.1", "port": 0, "drain_s": 1.0},
    }


def _limits(targets: Targets | None) -> dict[str, float]:
    if targets is None:
        return {}
    deadline_s = None if targets.deadline_ms is None else targets.deadline_ms / 1000
    limits = {"ttft_ms": targets.ttft_ms, "tbt_ms": targets.tbt_ms, "deadline_s": deadline_s}
    return {key: round(value, 3) for key, value in limits.items() if value is not None}


@asynccontextmanager
async def serve(wanted: Mapping[str, Any]) -> AsyncIterator[str]:
    """Run `kaiseki serve` as a process of its own and wait until it takes requests.

    Raises:
        ServerFailed: it did not start, or ended while it was needed.
    """
    with tempfile.TemporaryDirectory(prefix="kaiseki-demo-") as folder:
        config, log = Path(folder) / "settings.yaml", Path(folder) / "server.log"
        config.write_text(yaml.safe_dump(dict(wanted)))
        process = _start([*COMMAND, "serve", "--config", str(config)], log)
        try:
            yield await _ready(process, log)
            if process.poll() is not None:
                raise ServerFailed(f"the server ended with code {process.returncode}{_tail(log)}")
        finally:
            await _stop(process)


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    quiet = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=os.environ | quiet
        )


async def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL, once the server has printed it."""
    for _ in range(int(START_TIMEOUT_S / 0.1)):
        found = re.search(r"serves at (\S+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with code {process.returncode}{_tail(log)}")
        await asyncio.sleep(0.1)
    raise ServerFailed(f"the server was not ready after {START_TIMEOUT_S:.0f} s{_tail(log)}")


async def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        for _ in range(int(STOP_TIMEOUT_S / 0.05)):
            if process.poll() is not None:
                return
            await asyncio.sleep(0.05)
    finally:  # also when the wait itself is cancelled
        if process.poll() is None:
            process.kill()
            process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "; the end of its log:\n" + "\n".join(lines) if lines else "; its log is empty"


async def until_signalled(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; SIGTERM ends it in order, as Ctrl-C does, so that no server is left behind."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
