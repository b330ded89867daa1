"""`kaiseki top`: the terminal view of live documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tests.harness import Bench, job
from textual.widgets import DataTable, Static

from kaiseki.core.settings import SchedulerSettings
from kaiseki.observe.top import Story, Top


def document(bench: Bench, since: int) -> dict[str, Any]:
    driver = bench.driver
    counted = [{"tenant": "acme", "class": "fast", "attained": 3, "missed": 1}]
    health = {"ok": True, "reason": ""}
    return {**driver.snapshot(), **driver.live(since), "attainment": counted, "health": health}


def test_it_shows_requests_and_explains_one() -> None:
    bench = Bench("fcfs", settings=SchedulerSettings(max_batch_size=1))
    for name in ("first", "second"):
        bench.submit(job(name, 40, 20, tenant="acme"), list(range(40)))
    bench.driver.step()
    asked: list[str] = []

    async def documents() -> AsyncIterator[dict[str, Any]]:
        yield document(bench, -1)
        bench.run()  # both end, and their rows go
        yield document(bench, 0)
        await asyncio.Event().wait()

    async def look() -> None:
        app = Top(documents, lambda name: asked.append(name) or "because")  # type: ignore[func-returns-value]
        async with app.run_test(size=(140, 40)) as pilot:
            app.show(document(bench, -1))
            table = app.query_one(DataTable)
            app.show(before)
            assert [key.value for key in table.rows] == ["first", "second"]
            assert table.get_cell("second", "why it waits") == "no row"
            assert "running 1" in str(app.query_one("#head", Static).render())
            await pilot.press("enter")
            await pilot.pause()
            assert asked == ["first"]
            assert isinstance(app.screen, Story)
            await pilot.press("escape")
            app.show(document(bench, -1))
            assert not table.rows

    before = document(bench, -1)
    asyncio.run(look())


def test_a_server_that_is_gone_ends_it_with_a_message() -> None:
    async def documents() -> AsyncIterator[dict[str, Any]]:
        raise OSError("cannot reach it")
        yield {}

    async def look() -> str | None:
        app = Top(documents, str)
        async with app.run_test() as pilot:
            await pilot.pause()
        return app.return_value

    assert asyncio.run(look()) == "cannot reach it"
