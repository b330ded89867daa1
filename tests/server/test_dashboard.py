"""The dashboard: who may see it, what its stream says, and that the page shows it."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.server.fakes import Connect
from tests.server.served import Served, config_for, serving
from tests.server.test_admin import KEYS

CHROMIUM = shutil.which("chromium")
LONG = {"model": "", "prompt": [5] * 100, "max_tokens": 2500, "ignore_eos": True, "stream": True}


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()}


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/dashboard.js"])
def test_the_page_needs_a_key(connect: Connect, path: str) -> None:
    client = connect(KEYS)
    refused = client.get(path)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic")
    assert client.get(path, headers=basic("wrong")).status_code == 401
    assert client.get(path, headers=basic("acme")).status_code == 200
    assert client.get(path, headers={"authorization": "Bearer acme"}).status_code == 200


def test_all_that_the_page_asks_for_is_there(connect: Connect) -> None:
    client = connect()
    page = client.get("/dashboard").text
    for name in ("dashboard.css", "dashboard.js", "lanes.js"):
        assert client.get(f"/dashboard/{name}").status_code == 200
    assert "http" not in page.replace("<!doctype html>", "")  # nothing from elsewhere
    assert client.get("/dashboard/secrets.txt").status_code == 404


@pytest.mark.parametrize("interval", ["0", "-1", "x", "99999999999"])
def test_a_wrong_interval_is_named(connect: Connect, interval: str) -> None:
    answer = connect().get(f"/kaiseki/v1/live?interval_ms={interval}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "interval_ms"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(config_for(folder)) as server:
        yield server


def events(served: Served, key: str, count: int) -> list[dict[str, object]]:
    url = f"{served.url}/kaiseki/v1/live?interval_ms=100"
    found: list[dict[str, object]] = []
    with httpx.stream("GET", url, headers=basic(key), timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                break
    return found


def test_the_stream_shows_a_tenant_its_own_part(served: Served) -> None:
    with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG | {"model": served.stack.text.name},
                      headers=basic("acme"), timeout=60) as answer:  # fmt: skip
        lines = answer.iter_lines()
        next(lines)  # it runs, and goes on while this is not closed
        shown = {key: events(served, key, 2)[-1] for key in ("acme", "labs", "boss")}
    assert {key: len(document["requests"]) for key, document in shown.items()} == {  # type: ignore[arg-type]
        "acme": 1, "labs": 0, "boss": 1,
    }  # fmt: skip
    assert shown["boss"]["health"] == {"ok": True, "reason": ""}


def test_a_view_that_is_closed_makes_room(served: Served) -> None:
    for _ in range(20):  # more than may be open at a time
        assert events(served, "boss", 1)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
def test_the_page_shows_a_request_and_explains_it(served: Served) -> None:
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as tool,
        httpx.stream("POST", f"{served.url}/v1/completions", json=LONG | {"model": served.stack.text.name},
                     headers=basic("acme"), timeout=60) as answer,
    ):  # fmt: skip
        name = answer.headers["x-kaiseki-request-id"]
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(http_credentials={"username": "ops", "password": "boss"})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(f"{served.url}/dashboard")
        page.wait_for_selector(f"#r-{name}", timeout=60_000)
        page.focus("#requests")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open] #story-timeline tr", timeout=60_000)
        assert page.text_content("#story-title") == name
        page.keyboard.press("Escape")
        assert page.query_selector("dialog[open]") is None
        page.fill("#filter", "nobody has this name")
        assert page.query_selector_all("#requests li") == []
        browser.close()
        assert errors == []
