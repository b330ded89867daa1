"""From an HTTP request to running generations: who, what, how soon, and whether there is room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest

from kaiseki.config import Settings
from kaiseki.core.reasons import Reason
from kaiseki.core.requests import Request, ServiceClass
from kaiseki.engines.embedded.work import GenerationWork
from kaiseki.server.bodies import Generate
from kaiseki.server.bridge import Bridge
from kaiseki.server.envelope import read_body, request_id
from kaiseki.server.errors import ApiError, from_validation, invalid
from kaiseki.server.gate import Gate
from kaiseki.server.generation import Generation, Job
from kaiseki.server.identity import Caller, Directory
from kaiseki.server.seams import Backlog, DriverLike, TextModel
from kaiseki.server.slo import Targets, describe, offset

B = TypeVar("B", bound=Generate)
Encode = Callable[[], list[int]]
"""Tokenises one prompt; slow, so it runs on a thread."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request was found to be before its prompt was looked at."""

    caller: Caller
    cls: ServiceClass
    priority: int
    arrival_ns: int

    @property
    def slo(self) -> str:
        """For the `x-kaiseki-slo` header."""
        return describe(self.cls)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the digests of their full KV blocks."""

    ids: list[int]
    block_hashes: tuple[bytes, ...]


class Service:
    """What the routes share. Create it on the event loop that serves them."""

    def __init__(self, driver: DriverLike, model: TextModel, settings: Settings, backlog: Backlog) -> None:
        self.driver = driver
        self.model = model
        self.settings = settings
        self.directory = Directory(settings, settings.server.host)
        self.draining = False
        self.views = 0  # dashboards that are open
        self.started_s = int(time.time())
        self._targets = Targets(settings, self.directory)
        self._gate = Gate(backlog, driver.metrics, settings.scheduling)
        self._bridge = Bridge(asyncio.get_running_loop())
        self._tokenisers = ThreadPoolExecutor(2, "kaiseki-tokenise")
        self._open: set[Generation] = set()

    def close(self) -> None:
        """End the service's own threads."""
        self._tokenisers.shutdown(wait=False, cancel_futures=True)

    @property
    def open_generations(self) -> int:
        """HTTP requests that are being answered."""
        return len(self._open)

    def cancel_all(self) -> None:
        """End all generations, at the end of the time given for draining."""
        for generation in list(self._open):
            generation.cancel()

    async def read(self, http: HttpRequest, kind: type[B]) -> tuple[B, Asked]:
        """Find out who asks for what, in the order in which a wrong answer would say least to strangers.

        Raises:
            ApiError: with the status and the field that is wrong.
        """
        arrival_ns = time.monotonic_ns()
        caller = self.directory.caller(http.headers)
        raw = await read_body(http, self.settings.server.max_body_bytes)
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as error:
            raise from_validation(error) from None
        body.check()
        self.check_model(body.model)
        cls = self._targets.service_class(caller, http.headers)
        priority = offset(body.priority, body.agent_priority, caller.trusted)
        asked = Asked(caller, cls, priority, arrival_ns)
        with self._counted(asked):
            self._check_open()
        return body, asked

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 unless the model is the one served here."""
        if name != self.model.name:
            message = f"The model {name!r:.100} does not exist; this server has {self.model.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def generate(
        self,
        http: HttpRequest,
        body: Generate,
        asked: Asked,
        prompts: list[Encode],
        prompt_bytes: int,
        wanted_tokens: int | None,
        logprobs: int | None,
    ) -> Generation:
        """Submit `n` generations per prompt and wait for the first token. Close the result when done.

        Raises:
            ApiError: no room, a prompt that can't be, a refusal, an expiry or a failure.
        """
        choices = len(prompts) * body.choices
        most = self.settings.server.max_choices
        if choices > most:
            raise invalid("n", f"at most {most} outputs in one request (prompts times n)", choices)
        with self._counted(asked), self._gate.preparing(choices, prompt_bytes):
            loop = asyncio.get_running_loop()
            made = [await loop.run_in_executor(self._tokenisers, self._prompt, encode) for encode in prompts]
            jobs = list(self._jobs(request_id(http), body, asked, made, wanted_tokens, logprobs))
            total = sum(len(prompt.ids) for prompt in made)
            generation = Generation(self.driver, self._bridge, jobs, total)
        self._open.add(generation)
        try:
            await generation.start(http.receive)
        except BaseException:
            self.close_generation(generation)
            raise
        return generation

    def close_generation(self, generation: Generation) -> None:
        """The answer is out, or nobody wants it any more."""
        generation.close()
        self._open.discard(generation)

    def _prompt(self, encode: Encode) -> Prompt:
        ids = encode()
        if not ids:
            raise invalid("prompt", "must have at least one token")
        for wrong in (max(ids), min(ids)):
            if not 0 <= wrong < self.model.vocab_size:
                raise invalid("prompt", f"token ids must be in [0, {self.model.vocab_size})", wrong)
        return Prompt(ids, self.model.block_hashes(ids))

    def _jobs(
        self,
        base_id: str,
        body: Generate,
        asked: Asked,
        prompts: Iterable[Prompt],
        wanted_tokens: int | None,
        logprobs: int | None,
    ) -> Iterator[Job]:
        """A request and its work for each choice; those after a prompt's first are its forks."""
        index = 0
        for prompt in prompts:
            ids = prompt.ids
            max_tokens = wanted_tokens or max(1, self.model.max_total_tokens - len(ids))
            first = Request(
                id=base_id if index == 0 else f"{base_id}-{index}",
                prompt_tokens=len(ids),
                max_tokens=max_tokens,
                tenant=asked.caller.charged,
                cls=asked.cls,
                arrival_ns=asked.arrival_ns,
                min_tokens=body.certain_tokens(max_tokens),
                priority=asked.priority,
                block_hashes=prompt.block_hashes,
            )
            for k in range(body.choices):
                sampling = body.sampling(max_tokens, logprobs, k)
                request = first if k == 0 else replace(first, id=f"{base_id}-{index}", fork_of=first.id)
                yield request, GenerationWork(ids, sampling)
                index += 1

    def _check_open(self) -> None:
        if self.draining:
            message = f"Request refused: {Reason.DRAINING.sentence}."
            raise ApiError(503, message, code=Reason.DRAINING.label)
        health = self.driver.health()
        if not health.ok:  # it would wait for ever; whoever balances load should look elsewhere
            message = f"Request refused: {health.reason}."
            raise ApiError(503, message, code=health.code, retry_after_s=health.retry_after_s)

    @contextmanager
    def _counted(self, asked: Asked) -> Iterator[None]:
        """Count refusals that the scheduler never hears of."""
        try:
            yield
        except ApiError as error:
            for reason in (Reason.QUEUE_FULL, Reason.DRAINING, Reason.ENGINE_FAILING):
                if error.code == reason.label:
                    self.driver.metrics.count_refusal(asked.caller.charged, asked.cls.name, reason)
            raise
