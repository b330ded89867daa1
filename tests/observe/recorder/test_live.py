"""A server's process that is killed: its recording tells of what was open."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.harness import START_NS, Bench, job
from typer.testing import CliRunner

from kaiseki.cli import app
from kaiseki.observe.recorder.flight import FlightRecorder


def test_after_a_kill_what_was_open_is_explained(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        bench = Bench("fcfs", 0)
        bench.audit = bench.engine.check = False
        recorder = FlightRecorder.open(tmp_path, START_NS, 4, {}, bench.driver.scheduler)
        bench.driver.recorder = bench.driver._sessions._recorder = recorder
        for name in ("first", "second"):
            bench.submit(job(name, 40, 400), list(range(40)))
        for _ in range(20):
            bench.driver.step()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    result = CliRunner().invoke(app, ["explain", "second", "--recorder", str(tmp_path), "--json"])
    told = json.loads(result.stdout)
    assert told["outcome"] == "open" and "is still open" in told["summary"]
    assert [e["event"] for e in told["timeline"]] == ["submitted", "admitted", "first_token"]
