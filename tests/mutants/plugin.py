"""A pytest plugin for runs on mutants: failing examples are reported as found, not made smaller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

import kaiseki


def pytest_configure(config: pytest.Config) -> None:
    where = Path(kaiseki.__file__).resolve().parents[1]
    if where != Path(os.environ["PYTHONPATH"]).resolve():
        raise pytest.UsageError(f"the package comes from {where}, not from the patched copy")


def pytest_sessionstart(session: pytest.Session) -> None:
    # After the project's own profile is loaded, before the test modules make their settings of it.
    settings.register_profile("mutants", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
