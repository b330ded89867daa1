"""The application around fakes, called without a network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient
from tests.server.fakes import FakeDriver, FakeModel

from kaiseki.config import Settings
from kaiseki.server.app import create_app


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture
def client(driver: FakeDriver, model: FakeModel, settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(driver, model, settings, driver.backlog)) as client:
        yield client
