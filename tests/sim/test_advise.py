"""`kaiseki advise`: verdicts that follow from the numbers beside them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sim.test_command import TRACE
from typer.testing import CliRunner

from kaiseki.cli import app
from kaiseki.core.policy import Policy
from kaiseki.sim.advise import QUANTA, advise, traffic
from kaiseki.sim.run import Case
from kaiseki.work.batches import Batch

Make = Callable[..., Case]


def fleet_of(attained: dict[str, float], price: float = 1.0) -> Callable[[Case, Policy], dict[str, Any]]:
    """Simulates by looking figures up: attainment by policy, tokens/s in proportion."""

    def run(case: Case, policy: Policy) -> dict[str, Any]:
        reached = attained[policy.name] - 0.001 * (case.settings.quantum_tokens != 64)
        return {
            "attainment": reached,
            "cards": 8,
            "goodput_rps": reached,
            "output_tokens_per_s": 100.0 * attained[policy.name],
            "ttft_ms": {"p99": 1.0},
            "usd_per_million_output_tokens": price,
        }

    return run


def test_it_pays_where_it_attains_clearly_more(case: Make) -> None:
    figures = {"static": 0.5, "fcfs": 0.6, "priority": 0.7, "kaiseki": 0.95}
    found = advise({"a": case()}, fleet_of(figures))
    assert found["pays"] and "pays here" in found["verdict"] and "69.9% under priority" in found["verdict"]
    assert found["recommended"] == {
        "cluster": "a", "policy": "kaiseki", "quantum_tokens": 64, "mode": "mixed",
    }  # fmt: skip
    gap = next(r for r in found["reasons"] if r["name"].startswith("capacity"))
    assert gap["value"] == pytest.approx(1 - 0.5 / 0.95)
    assert [o["quantum_tokens"] for o in found["options"] if o["policy"] == "kaiseki"] == list(QUANTA)


def test_it_does_not_pay_where_others_do_as_well(case: Make) -> None:
    figures = {"static": 0.2, "fcfs": 0.94, "priority": 0.2, "kaiseki": 0.95}
    found = advise({"a": case()}, fleet_of(figures))
    assert not found["pays"] and "does not pay" in found["verdict"]


def test_of_two_fleets_that_do_the_cheaper_one_is_recommended(case: Make) -> None:
    figures = {"static": 0.5, "fcfs": 0.6, "priority": 0.7, "kaiseki": 0.95}
    dear, cheap = case(replicas=2), case(replicas=1)

    def run(given: Case, policy: Policy) -> dict[str, Any]:
        return fleet_of(figures, float(len(given.fleet)))(given, policy)

    assert advise({"dear": dear, "cheap": cheap}, run)["recommended"]["cluster"] == "cheap"


def test_traffic_is_described(case: Make) -> None:
    lengths = np.full(100, 100)
    lengths[:7] = 1_000
    found = traffic(case(Batch.of(0, np.arange(100) * 10**9, lengths, np.full(100, 5))))
    assert found.requests == 100 and found.long_share == pytest.approx(0.07)
    assert found.tightest_ttft_ms == 400.0 and found.kinds == 2


def test_the_command_says_what_it_found(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    result = CliRunner().invoke(app, ["advise", str(trace), "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["pays"] else 1)
    assert found["verdict"] in result.stderr and len(found["options"]) == 6
    words = shlex.split(found["options"][-1]["command"])
    again = CliRunner().invoke(app, [*words[1:], "--json"])
    figures = json.loads(again.stdout)["policies"]["kaiseki"]
    assert figures["attainment"] == found["options"][-1]["attainment"]
    assert found["options"][-1]["command"].rsplit(" --quantum", 1)[0] in result.stderr
