"""s28 over HTTP: after a cold start and in a burst, what /metrics says is at most one slot old."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.server.gated import Gated, clients, gated, until

from kaiseki.engines.reporting import report_load

ROWS, BURST, OUTPUT = 8, 60, 3
CONFIG = f"scheduling: {{max_batch_size: {ROWS}}}"


def truth(it: Gated) -> dict[str, float]:
    """The state itself, while the engine is in a slot and the scheduler at rest."""
    s = it.driver.scheduler
    return {
        "running": s.table.running_count,
        "waiting": len(s.waiting),
        "kv_free": s.kv.free_blocks(),
        "kv_live": s.kv.live_blocks(),
        "kv_total": s.kv.total_blocks,
    }


def test_gauges_are_at_most_one_slot_behind() -> None:
    with gated(CONFIG) as it:
        total = it.driver.scheduler.kv.total_blocks
        empty = {"running": 0, "waiting": 0, "kv_free": total, "kv_live": 0, "kv_total": total}
        assert it.gauges() == empty, "before the first slot"

        async def scenario() -> None:
            async with clients() as client:
                answers = [it.ask(client, 40, OUTPUT)]
                await asyncio.to_thread(it.engine.wait_started, 1)
                assert await asyncio.to_thread(it.gauges) == empty | {
                    "running": 1,
                    "kv_live": 3,
                    "kv_free": total - 3,
                }
                # A burst in the middle of a slot: the next slot's page has it.
                answers += [it.ask(client, 40, OUTPUT) for _ in range(BURST)]
                await until(lambda: it.driver.backlog()[0] == BURST)
                most, slots = 0.0, 1
                while not all(answer.done() for answer in answers):
                    it.engine.let(1)
                    slots += 1
                    await until(lambda: it.engine._started >= slots or not it.driver.busy)  # noqa: B023
                    if not it.driver.busy:
                        break
                    seen = await asyncio.to_thread(it.gauges)
                    assert seen == truth(it), f"slot {slots}"
                    most = max(most, seen["waiting"])
                assert most == BURST + 1 - ROWS
                assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}

        asyncio.run(scenario())
        assert it.gauges() == empty, "after the last slot"


class OnlyCounted:
    """A queue that can say how long it is and nothing else."""

    tokens = 7

    def __len__(self) -> int:
        return 1_000_000


def test_no_pass_over_the_queue_is_made_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with gated(CONFIG) as it:
        scheduler: Any = it.driver.scheduler
        monkeypatch.setattr(scheduler, "waiting", OnlyCounted())
        report_load(it.driver.metrics, scheduler, it.driver.backlog()[0])
        assert it.gauges()["waiting"] == 1_000_000
        assert it.driver.health().waiting == 1_000_000
        monkeypatch.undo()
