"""Compiled code is only faster: the same decisions as ordinary Python, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RUNS = 300


def decisions(disable_jit: str) -> list[list[object]]:
    env = os.environ | {"NUMBA_DISABLE_JIT": disable_jit}
    command = [sys.executable, "-m", "tests.conformance.decisions", str(RUNS)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: list[list[object]] = json.loads(done.stdout)
    return result


def test_decisions_are_the_same_compiled_and_uncompiled() -> None:
    compiled, plain = decisions("0"), decisions("1")
    assert len(compiled) == RUNS
    assert sum(int(str(n)) for _, n in compiled) > 10 * RUNS, "the runs were meant to take some slots"
    assert compiled == plain
