"""From the driver's thread to asyncio, with one wake-up of the loop per slot rather than per token."""

from __future__ import annotations

import asyncio
from collections import deque

from kaiseki.engines.updates import Sink, Update

News = list[tuple[int, Update]]
"""Updates with the index of the choice they belong to, oldest first."""


class Stream:
    """The updates of one HTTP request, for one reader on the event loop."""

    def __init__(self) -> None:
        self._news: News = []
        self._wake = asyncio.Event()

    def put(self, index: int, update: Update) -> None:
        """Add an update; call it on the loop."""
        self._news.append((index, update))
        self._wake.set()

    async def take(self) -> News:
        """All updates since the last call, at least one."""
        await self._wake.wait()
        self._wake.clear()
        news, self._news = self._news, []
        return news


class Bridge:
    """Collects updates on the driver's thread and hands them over together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inbox: deque[tuple[Stream, int, Update]] = deque()
        self._scheduled = False

    def sink(self, stream: Stream, index: int) -> Sink:
        """Where the driver puts the updates of one choice."""

        def put(update: Update) -> None:
            self._inbox.append((stream, index, update))
            if not self._scheduled:
                self._scheduled = True
                self._call_flush()

        return put

    def _call_flush(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._flush)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._inbox.clear()

    def _flush(self) -> None:
        # First the flag, then the inbox: an update that comes in between schedules another flush.
        self._scheduled = False
        while self._inbox:
            stream, index, update = self._inbox.popleft()
            stream.put(index, update)
