"""s08: prompt + max_tokens fits the model but not the KV pool.

Guards that what no schedule could finish is refused at submit, with both numbers, and that what just fits
is not. The real engine and the wire are in `tests/server/test_end_to_end.py`.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.harness import BUILT_IN, Bench, job
from tests.server.gated import clients, gated, until

from kaiseki.core.protocols import Capabilities
from kaiseki.core.reasons import Outcome, Reason

PAGE, POOL, CONTEXT = 16, 64, 4_096
FITS = PAGE * POOL


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", BUILT_IN)
def test_it_is_refused_at_once_and_the_rest_goes_on(policy: str, depth: int) -> None:
    caps = Capabilities(max_context_tokens=CONTEXT)
    bench = Bench(policy, depth, blocks=POOL, block_tokens=PAGE, capabilities=caps, audit=True)
    jobs = [job("over", FITS - 24, 25), job("exact", FITS - 24, 24), job("small", 30, 5)]
    bench.run(jobs, until_ns=bench.clock.now_ns() + 1)
    over = bench.served["over"]
    assert over.outcome == Outcome.REFUSED and over.end.reason == Reason.NEVER_FITS
    assert over.end.numbers["tokens"] == FITS + 1 and over.end.numbers["pool_tokens"] == FITS
    assert over.end.retry_after_s is None, "waiting cures nothing"
    bench.run()
    bench.check_end()
    assert {bench.served[n].outcome for n in ("exact", "small")} == {Outcome.COMPLETED}


def test_over_http_it_is_a_400_with_both_numbers() -> None:
    with gated("", blocks=POOL) as it:

        async def scenario() -> None:
            async with clients() as client:
                running = it.ask(client, 16, 2)
                await asyncio.to_thread(it.engine.wait_started, 1)
                refused = it.ask(client, FITS - 24, 25)
                await until(lambda: it.driver.backlog()[0] == 1)  # it is looked at after this slot
                it.engine.let(1)
                answer = await refused
                assert answer.status_code == 400
                assert answer.headers["x-kaiseki-reason"] == "never_fits"
                message = answer.json()["error"]["message"]
                assert str(FITS + 1) in message and str(FITS) in message
                it.engine.let(float("inf"))
                assert (await running).status_code == 200

        asyncio.run(scenario())
        assert it.driver.backlog() == (0, 0) and not it.driver.busy
