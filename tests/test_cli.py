"""The command line: exit codes, JSON, and answers without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from kaiseki.cli import app
from kaiseki.commands import told
from kaiseki.server.run import bind

GOOD = "scheduling: {max_batch_size: 8}\nclasses: {fast: {ttft_ms: 100}}\n"
BAD = "scheduling: {max_batch_sze: 8, timeout_ms: .inf}\n"
HEAVY = ("torch", "transformers", "numba", "numpy", "fastapi", "pydantic", "httpx", "yaml")


def run(*args: str) -> Any:
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "kaiseki.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kaiseki.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "serve" in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", ["serve", "pull", "check", "explain", "replay", "record export"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: kaiseki {command}" in result.stdout


def test_wrong_usage_is_2() -> None:
    for args in (
        ["nonsense"],
        ["check"],
        ["serve", "--port", "x"],
        ["serve", "--port", "99999"],
        ["check", "--no"],
    ):
        assert run(*args).exit_code == 2, args


def test_check_prints_the_effective_settings(config: Any) -> None:
    result = run("check", config(GOOD))
    assert result.exit_code == 0
    assert "max_batch_size: 8" in result.stdout
    assert "timeout_ms: 50.0" in result.stdout


def test_check_names_every_problem(config: Any) -> None:
    path = config(BAD)
    result = run("check", path)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "scheduling.max_batch_sze: unknown key; did you mean 'max_batch_size'" in result.stderr
    assert "scheduling.timeout_ms" in result.stderr


def test_check_json(config: Any, tmp_path: Path) -> None:
    good = run("check", config(GOOD), "--json")
    document = json.loads(good.stdout)
    assert (good.exit_code, document["ok"], document["errors"]) == (0, True, [])
    assert document["settings"]["classes"]["fast"]["ttft_ms"] == 100
    target = tmp_path / "out.json"
    bad = run("check", "--json", str(target), config(BAD))
    assert (bad.exit_code, bad.stdout) == (1, "")
    document = json.loads(target.read_text())
    assert document["ok"] is False
    assert {"path", "value", "message"} == set(document["errors"][0])
    assert {e["path"]: e["value"] for e in document["errors"]}["scheduling.timeout_ms"] == "inf"


def test_what_can_not_be_read_or_written_is_2(config: Any, tmp_path: Path) -> None:
    for args in (["check", str(tmp_path)], ["check", str(tmp_path / "no.yaml")]):
        result = run(*args)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "cannot read" in result.stderr
    result = run("check", config(GOOD), "--json", str(tmp_path / "no" / "out.json"))
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


def test_serve_tells_what_is_wrong_before_it_loads_a_model(config: Any, tmp_path: Path) -> None:
    for args, says in (
        (["--config", str(tmp_path / "no.yaml")], "cannot read"),
        (["--config", config(BAD)], "did you mean"),
        (["--policy", "kaisek"], "there are"),
        (["--host", "203.0.113.9", "--port", "0"], "cannot listen"),
        (["--port", "0", "--model", str(tmp_path / "nothing")], "is no model"),
    ):
        result = run("serve", *args)
        assert result.exit_code == 2, (args, result.stderr)
        assert says in result.stderr
        assert result.stdout == ""
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        result = run("serve", "--port", str(taken.getsockname()[1]))
        assert result.exit_code == 2
        assert "cannot listen" in result.stderr


def test_pull_of_no_model_is_2() -> None:
    result = run("pull", "not a model")
    assert result.exit_code == 2
    assert result.stdout == ""


EXPLAINED = {
    "request": "abc",
    "tenant": "acme",
    "class": "fast",
    "outcome": "completed",
    "timeline": [{"slot": 3, "t_ms": 1.5, "event": "admitted", "reason": "selected", "detail": None}],
    "waits": [{"reason": "no_kv", "ms": 12.5, "yielded_to": "def"}],
    "total_wait_ms": 12.5,
    "counterfactuals": ["4 more KV blocks would have let it in 12 ms sooner"],
    "summary": "abc waited 12.5 ms for KV blocks.",
}


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ok = self.path == "/kaiseki/v1/requests/a%2Fb" and self.headers["authorization"] == "Bearer k"
        body = EXPLAINED if ok else {"error": {"message": "No request is known"}}
        self.send_response(200 if ok else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode() if self.path != "/x" else b"<html>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Any:
    server = HTTPServer(("127.0.0.1", 0), _Server)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_explain(url: str) -> None:
    result = run("explain", "a/b", "--url", url, "--key", "k")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == EXPLAINED["summary"]
    assert "3\t1.5\tadmitted\tselected\t" in result.stdout
    assert "12.5\tno_kv\tdef" in result.stdout
    assert "4 more KV blocks" in result.stdout
    result = run("explain", "a/b", "--url", url, "--key", "k", "--json")
    assert json.loads(result.stdout) == EXPLAINED


def test_explain_draws_tables_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    told._draw(told.page_of_request(EXPLAINED))
    drawn = capsys.readouterr().out
    assert "admitted" in drawn
    assert "no_kv" in drawn
    told._draw(told.page_of_request({"request": "[bold]x"}))
    assert "[bold]x" in capsys.readouterr().out


def test_explain_without_an_answer(url: str) -> None:
    unknown = run("explain", "zz", "--url", url)
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "No request is known" in unknown.stderr
    for nowhere in ("http://127.0.0.1:1", "nonsense", "http://[", ""):
        result = run("explain", "zz", "--url", nowhere)
        assert result.exit_code == 2, nowhere
        assert "cannot reach" in result.stderr
