"""What the recorder tells over HTTP, and to whom."""

from __future__ import annotations

import pytest
from tests.harness import START_NS, Bench, job
from tests.server.fakes import Connect, FakeDriver
from tests.server.test_admin import KEYS

from kaiseki.core.settings import SchedulerSettings
from kaiseki.observe.recorder.flight import FlightRecorder


@pytest.fixture(autouse=True)
def recorded(driver: FakeDriver) -> None:
    bench = Bench("fcfs", settings=SchedulerSettings(max_batch_size=2))
    recorder = FlightRecorder.in_memory(START_NS, 1, {}, bench.driver.scheduler)
    bench.driver.recorder = bench.driver._sessions._recorder = recorder
    bench.run([job(f"r{i}", 40, 10, tenant=("acme", "labs")[i % 2]) for i in range(6)])
    driver.recorded = bench.driver.recording()


def test_a_slot_is_told_to_operators_only(connect: Connect) -> None:
    told = connect(KEYS, key="boss").get("/kaiseki/v1/slots/3").json()
    assert told["slot"] == 3 and len(told["chunks"]) == 2 and told["waiting"] == 4
    for key in ("acme", "labs"):
        assert connect(KEYS, key=key).get("/kaiseki/v1/slots/3").status_code == 404


@pytest.mark.parametrize(("slot", "status"), [("x", 400), ("-1", 400), ("9" * 30, 400), ("99999", 404)])
def test_a_slot_that_is_none(connect: Connect, slot: str, status: int) -> None:
    answer = connect(KEYS, key="boss").get(f"/kaiseki/v1/slots/{slot}")
    assert answer.status_code == status and "lot" in answer.json()["error"]["message"]


def test_a_tenant_sees_its_own_share_without_others_names(connect: Connect) -> None:
    client = connect(KEYS, key="acme")
    told = client.get("/kaiseki/v1/tenants/acme").json()
    assert {s["tenant"] for s in told["shares"]} == {"acme", "others"}
    assert "labs" not in client.get("/kaiseki/v1/tenants/acme").text
    assert told["waits"] and {w["yielded_to"] for w in told["waits"]} <= {"acme", "others", None}
    assert client.get("/kaiseki/v1/tenants/labs").status_code == 404
    told = connect(KEYS, key="boss").get("/kaiseki/v1/tenants/acme").json()
    assert {s["tenant"] for s in told["shares"]} == {"acme", "labs"}


def test_a_moment_that_is_none(connect: Connect) -> None:
    answer = connect(KEYS, key="acme").get("/kaiseki/v1/tenants/acme", params={"to": "noon"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "to" and "02:10" in answer.json()["error"]["message"]


def test_without_a_recorder_there_is_nothing(connect: Connect, driver: FakeDriver) -> None:
    driver.recorded = None
    client = connect(KEYS, key="boss")
    for route in ("slots/3", "tenants/acme"):
        assert client.get(f"/kaiseki/v1/{route}").status_code == 404
