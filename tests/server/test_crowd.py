"""Hundreds of connections of which half break off: those who stay are served, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.crowd import LEAVES, visit
from tests.server.served import Served, serving, until

from kaiseki.core.reasons import Outcome

CLIENTS = 300
CONFIG = """
engine: {{model: {folder}, threads: 1, own_process: false, max_context: 256}}
memory: {{pool_tokens: 3000, block_size: 8}}
"""


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with serving(CONFIG.format(folder=folder)) as served:
        yield served


def test_half_of_many_connections_break_off(served: Served) -> None:
    crowd = asyncio.run(visit(served.url, CLIENTS, seed=7))
    assert crowd.statuses == {200: CLIENTS // 2} and crowd.whole == CLIENTS // 2
    assert sum(crowd.left.values()) == CLIENTS // 2 and set(crowd.left) == set(LEAVES)
    until(served.idle)
    driver, pool = served.stack.driver, served.stack.driver.scheduler.kv
    assert pool.free_blocks() == pool.total_blocks, "blocks leaked"
    assert driver.scheduler.table.open_rows == 0, "rows leaked"
    assert driver.backlog() == (0, 0) and not driver.busy
    assert not served.stack.engine._rows, "the engine still has rows"
    assert served.get("/health").json() == {"status": "ok"}
    assert served.get("/metrics").status_code == 200  # which also counts what has ended since the last time
    cancelled = int(driver.metrics.ended[:, Outcome.CANCELLED].sum())
    assert cancelled >= CLIENTS // 12, "those who left were served to the end"
    load = driver.metrics.load
    assert (load.running, load.waiting, load.kv_live) == (0, 0, 0)
