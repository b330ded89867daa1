"""Fixtures and settings that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Two workers with two compute threads each would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Compiling a kernel inside an example takes seconds, so there is no deadline; the same examples each
# time, so that a red run says something about the change. `--hypothesis-profile=search` looks further.
settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("search", parent=settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile("ci")

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
TRACES = Path(os.environ.get("KAISEKI_TRACES", BESIDE))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, fetched into the user's cache the first time."""
    from kaiseki.models import ModelError, pull

    try:
        return pull("smollm2-135m-instruct").path
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not here and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Folder of recorded request traces: beside the checkout, or where KAISEKI_TRACES says."""
    if not TRACES.is_dir():
        pytest.skip(f"no request traces in {TRACES}; KAISEKI_TRACES may name another folder")
    return TRACES
