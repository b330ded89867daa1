"""How vLLM runs in tests. Where it is not installed, they are skipped; `make test-vllm` has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where schedulers publish their state."""
    monkeypatch.setenv("KAISEKI_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"
