"""Updates cross threads together and in order."""

from __future__ import annotations

import asyncio
import threading

from kaiseki.engines.updates import Update
from kaiseki.server.bridge import Bridge, Stream


def test_a_slot_wakes_the_loop_once() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        calls = 0
        plain = loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            nonlocal calls
            calls += 1
            return plain(*args)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[assignment, method-assign]
        bridge, streams = Bridge(loop), [Stream() for _ in range(100)]
        sinks = [bridge.sink(stream, i) for i, stream in enumerate(streams)]

        def slot() -> None:
            for k in range(3):
                for i, sink in enumerate(sinks):
                    sink(Update(str(i), k))

        driver = threading.Thread(target=slot)
        driver.start()
        driver.join()  # the loop is busy meanwhile, as it is with other requests
        for i, stream in enumerate(streams):
            news = await stream.take()
            assert [(index, update.time_ns) for index, update in news] == [(i, 0), (i, 1), (i, 2)]
        assert calls == 1

    asyncio.run(scenario())


def test_nothing_is_lost_between_flushes() -> None:
    async def scenario() -> None:
        bridge, stream = Bridge(asyncio.get_running_loop()), Stream()
        sink = bridge.sink(stream, 0)
        driver = threading.Thread(target=lambda: [sink(Update("x", k)) for k in range(20_000)])
        driver.start()
        seen: list[int] = []
        while len(seen) < 20_000:
            seen += [update.time_ns for _, update in await asyncio.wait_for(stream.take(), 10)]
        assert seen == list(range(20_000))
        driver.join()

    asyncio.run(scenario())


def test_a_closed_loop_does_not_hurt_the_driver() -> None:
    async def make() -> tuple[Bridge, Stream]:
        return Bridge(asyncio.get_running_loop()), Stream()

    bridge, stream = asyncio.run(make())
    bridge.sink(stream, 0)(Update("x", 0))
    bridge.sink(stream, 0)(Update("x", 1))
