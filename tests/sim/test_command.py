"""`kaiseki sim` and `kaiseki bench sim`: what they print, and what they say about wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kaiseki.cli import app

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,4
2023-11-16 18:17:04.0319600,396,9
2023-11-16 18:17:04.0781490,879,5
2023-11-16 18:17:09.1000000,91,3
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_policies_are_compared_on_a_trace(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    wanted = [
        "sim",
        str(trace),
        "--policy",
        "fcfs",
        "--policy",
        "kaiseki",
        "--json",
        str(out),
        "--seeds",
        "3",
    ]
    result = CliRunner().invoke(app, wanted)
    assert result.exit_code == 0, result.output
    assert "fcfs, 2048" in result.output and "kaiseki" in result.output
    found = json.loads(out.read_text())["policies"]
    assert list(found) == ["fcfs", "kaiseki"]
    for figures in found.values():
        assert figures["requests"] == figures["completed"] == 4 and len(figures["seeds"]) == 3
        assert figures["ttft_ms"]["p50"] > 0 and figures["attainment_due"] is None
    assert found["kaiseki"]["budget_tokens"] is None and found["fcfs"]["budget_tokens"] == 2048


def test_json_alone_on_standard_output(trace: Path) -> None:
    result = CliRunner().invoke(app, ["sim", str(trace), "--policy", "edf", "--budget", "64", "--json"])
    assert json.loads(result.stdout)["policies"]["edf"]["budget_tokens"] == 64


def test_the_highest_rate_is_found(trace: Path) -> None:
    result = CliRunner().invoke(app, ["sim", str(trace), "--policy", "kaiseki", "--goodput", "0.5", "--json"])
    found = json.loads(result.stdout)["goodput"]["kaiseki"]["at_50"]
    assert found["low"] < found["high"] and found["rps"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.csv"], ("nowhere.csv", "no such file", "chat-sessions")),
        (["{trace}", "--router", "best"], ("--router 'best'", "least-work")),
        (["{trace}", "--policy", "magic"], ("magic", "kaiseki")),
        (["{trace}", "--budget", "many"], ("--budget 'many'", "best")),
        (["{trace}", "--cluster", "mine"], ("mine", "70b-8xa100")),
        (["{trace}", "--format", "csv"], ("--format 'csv'", "azure")),
    ],
)
def test_wrong_input_is_named_with_what_is_allowed(
    trace: Path, arguments: list[str], says: tuple[str, ...]
) -> None:
    result = CliRunner().invoke(app, ["sim", *(a.format(trace=trace) for a in arguments)])
    assert result.exit_code == 2
    for part in says:
        assert part in result.stderr


def test_a_wrong_cluster_file_is_named_with_line_and_field(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("model: llama-3-8b\npools:\n  - name: a\n    card: h1000\n    replicas: -2\n")
    result = CliRunner().invoke(app, ["sim", str(trace), "--cluster", str(file)])
    assert result.exit_code == 2 and f"{file}, line 5: pools[0].replicas" in result.stderr
    file.write_text("model: llama-3-8b\npools:\n  - name: a\n    card: h1000\n")
    result = CliRunner().invoke(app, ["sim", str(trace), "--cluster", str(file)])
    assert result.exit_code == 2 and f"{file}, line 4: pools[0].card" in result.stderr
    assert "h1000" in result.stderr and "h100" in result.stderr


def test_a_broken_line_is_named(trace: Path) -> None:
    trace.write_text(TRACE + "2023-11-16 18:17:10.1000000,-5,3\n")
    result = CliRunner().invoke(app, ["sim", str(trace)])
    assert result.exit_code == 2 and "ContextTokens" in result.stderr and "6" in result.stderr


def test_the_speed_of_the_simulator_is_reported() -> None:
    result = CliRunner().invoke(app, ["bench", "sim", "--requests", "20", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code in (0, 1)
    assert found["iterations"] > 0 and found["peak_rss_mb"] > 0 and found["iterations_per_cpu_s"] > 0
