"""Every query of the dashboard, the alerts and the docs, on a real Prometheus that scrapes a live server."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.server.served import GENEROUS_S, Served, config_for, serving, until

from kaiseki.observe.grafana.panels import RANGE, ROWS

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus on the PATH")
DOCS = Path(__file__).parents[2] / "docs"


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(config_for(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Scrapes the server each second."""
    home = tmp_path_factory.mktemp("prometheus")
    target = {"targets": [served.url.removeprefix("http://")]}
    (home / "alerts.yaml").write_text(files("kaiseki.observe.grafana").joinpath("alerts.yaml").read_text())
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "kaiseki", "static_configs": [target]}],
    }
    (home / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_port()}"
    assert PROMETHEUS is not None
    command = [PROMETHEUS, f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data",
               f"--web.listen-address={url.removeprefix('http://')}"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield url
        finally:
            process.terminate()


def ask(url: str, query: str) -> list[Any]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query.replace(RANGE, "30s")}, timeout=30)
    answer.raise_for_status()
    found: list[Any] = answer.json()["data"]["result"]
    return found


def busy(served: Served) -> None:
    """Requests that are served, share prompts, queue, are preempted, refused and expire."""
    name = served.stack.text.name
    long = {"model": name, "prompt": [7] * 600, "max_tokens": 600, "ignore_eos": True, "stream": True}
    streams = [httpx.Client(timeout=GENEROUS_S) for _ in range(6)]
    open_ones = [
        client.stream("POST", f"{served.url}/v1/completions", json=long | {"prompt": [i + 1] * 600},
                      headers={"authorization": f"Bearer {key}"})
        for i, (client, key) in enumerate(zip(streams, ("acme", "labs") * 3, strict=True))
    ]  # fmt: skip
    answers = [stream.__enter__() for stream in open_ones]
    hurried = {"x-llm-d-inference-objective": "hurried"}
    assert served.post({"model": name, "prompt": [3] * 50, "max_tokens": 4}, **hurried).status_code == 503
    for answer in answers:
        for _ in answer.iter_lines():
            pass
    for _ in range(3):
        served.post({"model": name, "prompt": [9] * 300, "max_tokens": 4})
    for stream, client in zip(open_ones, streams, strict=True):
        stream.__exit__(None, None, None)
        client.close()


def test_every_query_returns_data(served: Served, prometheus: str) -> None:
    def up() -> bool:
        try:
            return bool(ask(prometheus, "up == 1"))
        except httpx.HTTPError:
            return False

    until(up)
    before = time.time()
    while time.time() < before + 3:  # two scrapes before, so that rates see things grow
        time.sleep(0.2)
    busy(served)
    until(lambda: bool(ask(prometheus, "changes(kaiseki_slot_seconds_count[5s]) == 0")))
    queries = {query for panels in ROWS.values() for panel in panels for query, _ in panel.queries}
    queries |= {
        q for page in DOCS.glob("*.md") for q in re.findall(r"```promql\n(.*?)```", page.read_text(), re.S)
    }
    assert sorted(query for query in queries if not ask(prometheus, query)) == []


def test_the_alerts_are_loaded_and_quiet(served: Served, prometheus: str) -> None:
    groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=30).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 6
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert not any(rule["state"] == "firing" for rule in rules)
