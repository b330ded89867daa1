"""Files about a run: the page, the columns, the picture; and the sweep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.sim.test_command import TRACE
from typer.testing import CliRunner

from kaiseki.cli import app
from kaiseki.core.policy import Policy
from kaiseki.policies.registry import load as policy
from kaiseki.sim import Case, columns, run
from kaiseki.sim.sweep import BETTER, LAMBDAS, MUS, sweep

Make = Callable[..., Case]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    paths = {name: tmp_path / name for name in ("report", "parquet", "perfetto")}
    options = [part for name, path in paths.items() for part in (f"--{name}", str(path))]
    wanted = ["sim", str(trace), "--policy", "fcfs", "--policy", "kaiseki", *options]
    result = CliRunner().invoke(app, [*wanted, "--json", str(tmp_path / "json")])
    assert result.exit_code == 0, result.output
    return paths | {"json": tmp_path / "json"}


def test_the_files_of_a_run(files: dict[str, Path]) -> None:
    document = json.loads(files["json"].read_text())["policies"]
    page = files["report"].read_text()
    assert page.count("<svg") == 2 and "interactive: TTFT" in page and "kaiseki" in page
    assert "src=" not in page and "<link" not in page and "url(http" not in page, "it loads something"
    table = pq.read_table(files["parquet"]).to_pydict()
    for name, figures in document.items():
        mine = [ok for ok, who in zip(table["attained"], table["policy"], strict=True) if who == name]
        assert len(mine) == figures["requests"] and np.mean(mine) == pytest.approx(figures["attainment"])
    events = json.loads(files["perfetto"].read_text())["traceEvents"]
    opened = [e for e in events if e["ph"] == "b"]
    assert len(opened) == sum(e["ph"] == "e" for e in events) == 2 * 4 * 4
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == set(document)
    counts = [e["args"] for e in events if e["ph"] == "C"]
    assert counts[-1] == {"waiting": 0, "running": 0} and min(min(c.values()) for c in counts) == 0


def test_columns_add_up_to_the_figures(case: Make) -> None:
    figures, log = run(case(), policy("kaiseki"))
    table = columns(log)
    assert {len(column) for column in table.values()} == {figures["requests"]}
    assert np.mean(table["attained"]) == pytest.approx(figures["attainment"])
    assert sum(table["preemptions"]) == figures["preemptions"]
    ttft = np.subtract(table["first_token_ns"], table["arrival_ns"]) / 1e6
    assert np.percentile(ttft, 50) == pytest.approx(figures["ttft_ms"]["p50"])
    assert 0.0 < figures["fragmentation"] < 0.2


def test_what_is_better_on_no_axis_is_off_the_front(case: Make) -> None:
    def fake(given: Case, made: Policy) -> dict[str, Any]:
        s = given.settings
        good = s.slo_lambda == LAMBDAS[1] and s.kv_mu == MUS[1]
        thrifty = s.slo_lambda == LAMBDAS[2] and s.kv_mu == MUS[0]
        return {
            "attainment": 0.9 if good else 0.8,
            "gpu_utilisation": 0.5,
            "fragmentation": 0.01 if thrifty else 0.02,
            "preemptions": 0,
        }

    rows = sweep(case(), policy("kaiseki"), fake)
    assert len(rows) == len(LAMBDAS) * len(MUS) and all(set(BETTER) <= set(row) for row in rows)
    front = {(row["lambda"], row["mu"]) for row in rows if row["front"]}
    assert front == {(LAMBDAS[1], MUS[1]), (LAMBDAS[2], MUS[0])}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sweep", "tau"], ("--sweep 'tau'", "lambda,mu")),
        (["--sweep", "lambda,mu", "--policy", "fcfs"], ("fcfs", "kaiseki does")),
        (["--report", "nowhere/at/all.html"], ("nowhere/at/all.html", "no folder")),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, arguments: list[str], says: tuple[str, ...]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    result = CliRunner().invoke(app, ["sim", str(trace), *arguments])
    assert result.exit_code == 2
    for part in says:
        assert part in result.stderr
