"""s13 over HTTP: the queue is limited by tokens; 500 prompts of 8 K tokens arrive during one slot."""

from __future__ import annotations

import asyncio

import httpx
from tests.server.gated import clients, gated, until

BURST, PROMPT, FIT = 500, 8_000, 5
CONFIG = f"scheduling: {{max_waiting_tokens: {FIT * PROMPT}}}"


def test_a_burst_is_refused_before_it_is_tokenised_and_before_the_next_slot() -> None:
    with gated(CONFIG) as it:

        async def scenario() -> None:
            async with clients() as client:
                first = it.ask(client, 16, 1)
                await asyncio.to_thread(it.engine.wait_started, 1)
                slot, tokenised = it.driver.scheduler.life.slot, it.model.encoded
                burst = [it.ask(client, PROMPT, 1) for _ in range(BURST)]
                refused = [await answer for answer in await first_done(burst, BURST - FIT)]
                await until(lambda: it.driver.backlog() == (FIT, FIT * PROMPT))
                # All this within the slot that ran when they came.
                assert it.driver.scheduler.life.slot == slot and not first.done()
                assert it.model.encoded == tokenised + FIT, "prompts were tokenised to be refused"
                for answer in refused:
                    check_refused(answer)
                it.engine.let(float("inf"))
                assert [answer.status_code for answer in await asyncio.gather(*burst)].count(200) == FIT
                assert (await first).status_code == 200

        asyncio.run(scenario())
        assert it.driver.backlog() == (0, 0)


async def first_done(
    burst: list[asyncio.Future[httpx.Response]], count: int
) -> list[asyncio.Future[httpx.Response]]:
    """The first `count` answers, which come while the engine is busy with its slot."""
    await until(lambda: sum(answer.done() for answer in burst) >= count)
    return [answer for answer in burst if answer.done()]


def check_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 429
    assert answer.headers["x-kaiseki-reason"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    assert f"the limit is {FIT * PROMPT}" in answer.json()["error"]["message"]
