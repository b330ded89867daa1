"""The whole demonstration against a server without a model."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvicorn
import yaml
from rich.console import Console
from tests.server.fakes import FakeDriver, FakeModel

from kaiseki.config import parse
from kaiseki.demo.narrator import Narrator
from kaiseki.demo.report import document
from kaiseki.demo.run import Demo, Options
from kaiseki.demo.tables import PLAIN_WIDTH, show
from kaiseki.server.app import create_app

EXPLAINED = {
    "tenant": "reports",
    "attained": True,
    "summary": "it waited for chats",
    "timeline": [{"event": "preempted"}],
    "waits": [{"reason": "no_time", "ms": 12.0, "yielded_to": None, "detail": "a slot was full"}],
    "total_wait_ms": 12.0,
}


class ExplainingDriver(FakeDriver):
    def submit(self, request, work, sink):
        self.metrics.totals[0] += request.prompt_tokens
        super().submit(request, work, sink)

    def explain(self, request_id: str):
        return {"request": request_id, **EXPLAINED}


class LongModel(FakeModel):
    """Takes prompts of any length."""

    def block_hashes(self, prompt_ids):
        return ()


@dataclass
class Launcher:
    """Serves the fake driver in a thread, with the settings that the demonstration wants."""

    policies: list[tuple[str, int | None]] = field(default_factory=list)

    @asynccontextmanager
    async def __call__(self, wanted):
        scheduling = wanted["scheduling"]
        self.policies.append((scheduling["policy"], scheduling.get("budget_tokens")))
        driver = ExplainingDriver()
        app = create_app(driver, LongModel(), parse(yaml.safe_dump(wanted)), driver.backlog)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await asyncio.to_thread(thread.join)


@pytest.fixture(scope="module")
def ran():
    from tests.demo.conftest import words

    launcher = Launcher()
    options = Options("tiny", seeds=(1, 2), seconds=0.5, closed_loop_s=0.5, lone_requests=(3, 3))
    console = Console(record=True, width=PLAIN_WIDTH, file=open("/dev/null", "w"))  # noqa: SIM115
    found = asyncio.run(Demo(options, launcher, words, Narrator(console)).run())
    result = document(found, options)
    show(result, console)
    return launcher, result, console.export_text()


def test_each_policy_ran_once_and_the_baselines_with_the_budget_that_was_picked(ran):
    policies = ran[0].policies
    assert [name for name, _ in policies] == ["fcfs", "fcfs", "priority", "kaiseki"]
    budgets = [budget for _, budget in policies]
    assert budgets[0] is budgets[3] is None
    assert budgets[1] == budgets[2] in (64, 128, 256, 512)


def test_the_document_has_the_keys_that_scripts_rely_on(ran):
    result = json.loads(json.dumps(ran[1], allow_nan=False))
    assert list(result["policies"]) == ["fcfs", "priority", "kaiseki"]
    for figures in result["policies"].values():
        assert {"attainment", "output_tokens_per_s", "budget_tokens"} <= figures.keys()
        for cls in ("interactive", "batch"):
            wanted = {"requests", "attainment", "ttft_ms", "tbt_ms", "ttft_target_ms", "tbt_target_ms"}
            assert wanted <= figures["classes"][cls].keys()
    assert result["load"]["offered_ratio"] == pytest.approx(1.3, rel=0.1)
    assert result["load"]["interactive_share"] <= 0.4
    assert result["explained"]["summary"] == EXPLAINED["summary"]
    assert [entry["seed"] for entry in result["seeds"]] == [1, 2]
    assert len(result["verdicts"]) == 4


def test_answers_are_counted(ran):
    for figures in ran[1]["policies"].values():
        batch = figures["classes"]["batch"]
        assert 0 < batch["completed"] <= batch["requests"]


def test_people_get_a_table_verdicts_and_an_explanation(ran):
    text = ran[2]
    for part in ("kaiseki", "priority", "TTFT", "tokens/s", "wanted 0.95", "explained: it waited for chats"):
        assert part in text
    assert "a slot was full" in text
