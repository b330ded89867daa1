"""Sends requests and collects what the server says of their times; light, since it shares the machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families

from kaiseki.demo.prompts import Prompt

F64 = npt.NDArray[np.float64]
REQUEST_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are the server's, on one clock.

    Attributes:
        prompt: what was asked.
        request_id: the server's id, empty when there was no answer at all.
        status: HTTP status, 0 without an answer.
        error: the error's code, empty when there was none.
        arrival_ms: when the request reached the server; nan unless it got a token.
        token_ms: float64[n], when each token was emitted.
        finished: the output is complete.
        demoted: it became best effort on the way.
    """

    prompt: Prompt
    request_id: str = ""
    status: int = 0
    error: str = ""
    arrival_ms: float = float("nan")
    token_ms: F64 = field(default_factory=lambda: np.empty(0))
    finished: bool = False
    demoted: bool = False

    @property
    def ttft_ms(self) -> float:
        """Arrival to first token; nan without one."""
        return float(self.token_ms[0]) - self.arrival_ms if self.token_ms.size else float("nan")

    @property
    def e2e_ms(self) -> float:
        """Arrival to last token; nan unless finished."""
        return float(self.token_ms[-1]) - self.arrival_ms if self.finished else float("nan")

    @property
    def gaps_ms(self) -> F64:
        """Between consecutive tokens."""
        return np.diff(self.token_ms)


class Exchange:
    """One request on its way; what arrives is kept as it is and read afterwards."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self._status = 0
        self._request_id = ""
        self._body = bytearray()

    async def run(self, client: httpx.AsyncClient, model: str) -> None:
        """Send it and read the stream to its end; a connection that breaks is an answer that ends early."""
        body = {
            "model": model,
            "messages": self.prompt.messages,
            "max_completion_tokens": self.prompt.output_tokens,
            "min_tokens": self.prompt.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                self._status = response.status_code
                self._request_id = response.headers.get("x-kaiseki-request-id", "")
                async for data in response.aiter_raw():
                    self._body += data
        except httpx.TransportError:
            return

    def answer(self) -> Answer:
        """What is known so far."""
        answer = Answer(self.prompt, self._request_id, self._status)
        if self._status != 200:
            answer.error = _error_code(bytes(self._body)) or f"http_{self._status}"
            return answer
        times: list[float] = []
        for line in bytes(self._body).split(b"\n\n")[:-1]:
            if line.startswith(b"data: {"):
                _read_event(answer, times, json.loads(line[6:]))
        answer.token_ms = np.array(times)
        return answer


def _read_event(answer: Answer, times: list[float], event: Mapping[str, Any]) -> None:
    if "error" in event:
        answer.error = event["error"].get("code") or "error"
        return
    stamp = event.get("kaiseki")
    if stamp:
        answer.arrival_ms = stamp["arrival_ms"]
        times += [stamp["t_ms"]] * stamp["tokens"]
        answer.demoted = answer.demoted or stamp["demoted"]
    answer.finished = answer.finished or any(c.get("finish_reason") for c in event.get("choices", ()))


def _error_code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


class Clients:
    """One connection pool per class, each with its tenant's key."""

    exchange: type[Exchange] = Exchange

    def __init__(self, url: str, model: str, keys: Mapping[str, str]) -> None:
        self._model = model
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._by_class = {
            cls: httpx.AsyncClient(
                base_url=url,
                headers={"authorization": f"Bearer {key}", "x-kaiseki-timing": "1"},
                timeout=REQUEST_TIMEOUT_S,
                limits=limits,
                trust_env=False,
            )
            for cls, key in keys.items()
        }

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *error: object) -> None:
        for client in self._by_class.values():
            await client.aclose()

    def begin(self, prompt: Prompt) -> tuple[Exchange, asyncio.Task[None]]:
        """Send a request without waiting for anything."""
        exchange = self.exchange(prompt)
        return exchange, asyncio.create_task(exchange.run(self._by_class[prompt.cls], self._model))

    async def ask(self, prompt: Prompt) -> Answer:
        """Send a request and wait for its end."""
        exchange, task = self.begin(prompt)
        await task
        return exchange.answer()

    async def prompt_tokens_done(self) -> int:
        """Prompt tokens that the server has computed so far."""
        client = next(iter(self._by_class.values()))
        page = (await client.get("/metrics")).raise_for_status().text
        samples = (s for family in text_string_to_metric_families(page) for s in family.samples)
        return int(sum(s.value for s in samples if s.name == "vllm:prompt_tokens_total"))

    async def explain(self, cls: str, request_id: str) -> dict[str, Any] | None:
        """The server's explanation of a request of that class, None if it has none."""
        response = await self._by_class[cls].get(f"/kaiseki/v1/requests/{request_id}")
        return response.json() if response.status_code == 200 else None
