"""Compiled code is only faster: from the same state the same decisions as ordinary Python, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

STATES = 1000


def decisions(disable_jit: str) -> list[list[object]]:
    env = os.environ | {"NUMBA_DISABLE_JIT": disable_jit}
    command = [sys.executable, "-m", "tests.core.states", str(STATES)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: list[list[object]] = json.loads(done.stdout)
    return result


def test_decisions_are_the_same_compiled_and_uncompiled() -> None:
    compiled, plain = decisions("0"), decisions("1")
    assert len(compiled) == STATES
    assert sum(int(str(chunks)) for _, chunks in compiled) > 3 * STATES, "the states were meant to be busy"
    assert compiled == plain
