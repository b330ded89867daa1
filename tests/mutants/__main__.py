"""Break one rule of the core at a time and see which test notices: `python -m tests.mutants [word ...]`.

Each mutant runs in a patched copy of the package, uncompiled, so that no compiled kernel of one is ever
taken for another's. With words, only mutants whose names contain one of them are run. Prints a table;
exits 1 when a mutant survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 600


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    survivors = 0
    print("| rule that is broken | where | noticed by |\n|---|---|---|", flush=True)
    for mutant in chosen:
        killer = run(mutant)
        survivors += killer is None
        print(f"| {mutant.name} | `{mutant.path}` | {killer or '**nobody**'} |", flush=True)
    print(f"\n{len(chosen) - survivors} of {len(chosen)} noticed", flush=True)
    return int(survivors > 0)


def run(mutant: Mutant) -> str | None:
    """The first test that fails with the mutant, or None."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kaiseki"
        shutil.copytree(ROOT / "src" / "kaiseki", source, ignore=shutil.ignore_patterns("__pycache__"))
        patch(source / mutant.path, mutant)
        for test in mutant.tests:
            killer = first_failure(test, folder)
            if killer is not None:
                return killer
    return None


def patch(path: Path, mutant: Mutant) -> None:
    """Put the change in place.

    Raises:
        ValueError: the source has changed so that it fits no longer, or in more than one place.
    """
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: found {text.count(mutant.old)} times in {mutant.path}")
    path.write_text(text.replace(mutant.old, mutant.new))


def first_failure(test: str, folder: str) -> str | None:
    """Name of the first test in a file that fails with the package in this folder, or None.

    Raises:
        RuntimeError: the tests did not run at all.
    """
    env = os.environ | {
        "PYTHONPATH": folder,
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_DISABLE_JIT": "1",
        "OMP_NUM_THREADS": "1",
    }
    # Without the search for a smaller example: that it fails is all that is asked.
    command = [sys.executable, "-m", "pytest", "-xq", "--no-header", "-p", "no:cacheprovider", "-rfE"]
    command += ["-p", "tests.mutants.plugin", test]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return f"`{test}` (never ends)"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or found is None:
        raise RuntimeError(f"{test}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    return f"`{found[1].removeprefix('tests/').replace('::runTest', '')}`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
