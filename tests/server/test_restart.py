"""`kill -9` in the middle of an answer, and the same command again on the same port."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.server.served import GENEROUS_S, until

CONFIG = """
engine: {{model: {folder}, threads: 1, max_context: 2048}}
memory: {{pool_tokens: 3000, block_size: 8}}
"""
LONG = {"model": "tiny", "prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}


@contextmanager
def command(config: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kaiseki serve`, once it is ready, and its URL."""
    kaiseki = str(Path(sys.executable).with_name("kaiseki"))
    line = [kaiseki, "serve", "--config", str(config), "--port", str(port)]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stderr is not None
        said = server.stdout.readline()
        assert said.startswith("Kaiseki serves at http://"), server.stderr.read()
        yield server, said.split()[-1]
    finally:
        server.kill()
        server.communicate(timeout=GENEROUS_S)


def children(pid: int) -> list[int]:
    """Processes that this one started."""
    found = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [int(path.name) for path in found if (told := status(path)) and told["PPid"] == str(pid)]


def status(process: Path) -> dict[str, str]:
    """What the system says of a process; nothing when it has ended."""
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return {}
    told = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {} if told["State"].startswith("Z") else told


@pytest.mark.slow
def test_killed_and_started_again(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "kaiseki.yaml"
    config.write_text(CONFIG.format(folder=folder))
    with command(config, 0) as (server, url):
        (engine,) = children(server.pid)
        before = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=GENEROUS_S).json()
        with (
            pytest.raises(httpx.HTTPError),
            httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=GENEROUS_S) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            server.kill()
            assert server.wait(GENEROUS_S) == -9
            "".join(lines)  # must not look like an answer that has ended
        until(lambda: not status(Path(f"/proc/{engine}")))  # in the middle of a step, with nobody to tell it
    with command(config, httpx.URL(url).port or 0) as (server, again):
        assert again == url
        assert httpx.get(f"{url}/health", timeout=GENEROUS_S).json() == {"status": "ok"}
        after = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=GENEROUS_S).json()
        assert after["choices"] == before["choices"] and after["id"] != before["id"]
        state = httpx.get(f"{url}/kaiseki/v1/state", timeout=GENEROUS_S).json()
        assert (state["open"], state["kv"]["live_blocks"]) == (0, 0)
