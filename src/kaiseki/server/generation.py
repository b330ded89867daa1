"""One HTTP request's generations: submitted together, read as one stream, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from kaiseki.core.reasons import Finish, Outcome
from kaiseki.core.requests import Request
from kaiseki.engines.embedded.work import GenerationWork, TokenOutput
from kaiseki.engines.updates import Update
from kaiseki.server.bridge import Bridge, News, Stream
from kaiseki.server.errors import ended_badly
from kaiseki.server.seams import DriverLike

Job = tuple[Request, GenerationWork]


@dataclass(slots=True)
class Piece:
    """What one slot added to one choice."""

    index: int
    tokens: list[TokenOutput]
    finish: str | None
    time_ns: int = 0
    demoted: bool = False

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(token.text for token in self.tokens)


class Generation:
    """The choices of one HTTP request. Close it when done, however it went."""

    def __init__(self, driver: DriverLike, bridge: Bridge, jobs: Sequence[Job], prompt_tokens: int) -> None:
        self.jobs = jobs
        self._driver = driver
        self._bridge = bridge
        self._stream = Stream()
        self._open = {index: request.id for index, (request, _) in enumerate(jobs)}
        self._first: News = []
        self._watch: asyncio.Task[None] | None = None
        self._prompt_tokens = prompt_tokens
        self._output_tokens = 0
        self._cached: dict[int, int] = {}

    async def start(self, receive: Receive) -> None:
        """Submit everything and wait until the first token is there, so that a refusal can have a status.

        From now on a client that disconnects ends the generations at once.

        Raises:
            ApiError: it was refused, expired in the queue, or failed.
        """
        for index, (request, work) in enumerate(self.jobs):
            self._driver.submit(request, work, self._bridge.sink(self._stream, index))
        self._watch = asyncio.create_task(self._cancel_on_disconnect(receive))
        self._first = await self._take()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What happened, slot by slot, until all choices have ended.

        Raises:
            ApiError: a choice ended without being completed.
        """
        news, self._first = self._first, []
        while True:
            yield [self._piece(index, update) for index, update in news]
            if not self._open:
                return
            news = await self._take()

    async def complete(self) -> dict[int, Piece]:
        """All choices, whole.

        Raises:
            ApiError: a choice ended without being completed.
        """
        whole = {index: Piece(index, [], None) for index in range(len(self.jobs))}
        async for pieces in self.pieces():
            for piece in pieces:
                whole[piece.index].tokens += piece.tokens
                whole[piece.index].finish = piece.finish
        return whole

    def cancel(self) -> None:
        """End what is still open; readers get to know it as for any other ending."""
        for request_id in self._open.values():
            self._driver.cancel(request_id)

    def close(self) -> None:
        """Stop listening to the client and end what is still open."""
        if self._watch is not None:
            self._watch.cancel()
        self.cancel()

    def usage(self) -> dict[str, Any]:
        """Token counts so far, in OpenAI's shape."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._output_tokens,
            "total_tokens": self._prompt_tokens + self._output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    async def _take(self) -> News:
        news = await self._stream.take()
        for index, update in news:
            if update.outcome is not Outcome.OPEN:
                self._open.pop(index, None)
            if update.outcome not in (Outcome.OPEN, Outcome.COMPLETED):
                raise ended_badly(update)
        return news

    def _piece(self, index: int, update: Update) -> Piece:
        self._output_tokens += len(update.token_ids)
        if self.jobs[index][0].fork_of is None:
            self._cached[index] = update.cached_tokens
        finish = None
        if update.outcome is Outcome.COMPLETED:
            finish = "length" if update.finish is Finish.LENGTH else "stop"
        return Piece(index, list(update.payload or ()), finish, update.time_ns, update.demoted)

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()
