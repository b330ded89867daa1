"""The shape of the project: what may import what, and what an installation offers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter import cli

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "kaiseki"

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "pandas")


def test_layers(capsys: pytest.CaptureFixture[str]) -> None:
    broken = cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert not broken, capsys.readouterr().out


def test_the_core_does_no_io() -> None:
    """Built-ins need no import, so the import contracts can't see them."""
    calls = [
        f"{path.name}:{node.lineno} {node.func.id}"
        for path in (SOURCES / "core").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("open", "print", "input", "exec", "eval", "__import__")
    ]
    assert calls == []


@pytest.mark.parametrize(
    "module",
    ["kaiseki.core.scheduler", "kaiseki.policies.registry", "kaiseki.models", "kaiseki.work.catalogue"],
)
def test_light_parts_load_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
