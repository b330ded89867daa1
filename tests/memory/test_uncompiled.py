"""Compiled and uncompiled kernels do the same, to the last array entry."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

from tests.memory.driver import Driver


def history(seed):
    """Digest of all arrays of a pool after each of many random moves."""
    rng = random.Random(seed)
    driver = Driver.any(rng)
    digest = hashlib.sha256()
    for _ in range(150):
        getattr(driver, rng.choice(driver.MOVES))(rng)
        state = driver.pool._state
        for array in state._replace(chain=state.chain[:0]):
            digest.update(array.tobytes())
    return digest.hexdigest()


def test_compiled_and_uncompiled_agree():
    here = Path(__file__).resolve()
    run = subprocess.run(
        [sys.executable, str(here)],
        env=os.environ
        | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join([str(here.parents[2]), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [history(seed) for seed in range(12)]


if __name__ == "__main__":
    print(*[history(seed) for seed in range(12)])
