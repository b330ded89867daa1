"""The application around fakes, called without a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.server.fakes import Connect, FakeDriver, FakeModel
from tests.server.served import make_folder

from kaiseki.config import Settings, parse
from kaiseki.server.app import create_app


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which takes a few seconds to make."""
    return make_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def connect(driver: FakeDriver, model: FakeModel) -> Iterator[Connect]:
    """A function that starts the application with settings given as YAML."""
    with ExitStack() as open_clients:

        def make(yaml: str = "", key: str | None = None) -> TestClient:
            settings = parse(yaml) if yaml else Settings()
            app = create_app(driver, model, settings, driver.backlog)
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return open_clients.enter_context(TestClient(app, headers=headers))

        yield make


@pytest.fixture
def client(connect: Connect) -> TestClient:
    return connect()
