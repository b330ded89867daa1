"""A driver and a model without an engine: each request follows a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.testclient import TestClient

from kaiseki.core.reasons import Finish, Outcome, Reason
from kaiseki.core.requests import Request
from kaiseki.engines.embedded.work import GenerationWork, TokenLogprob, TokenOutput
from kaiseki.engines.updates import Sink, Update
from kaiseki.observe.metrics import Bins
from kaiseki.observe.recorder.reading import Recording

Connect = Callable[..., TestClient]
"""Starts the application with settings given as YAML and a key to send."""


class FakeModel:
    """Tokens are characters."""

    name = "tiny"
    max_context = 128
    max_total_tokens = 100
    vocab_size = 256

    def __init__(self) -> None:
        self.encoded = 0
        self.chats: list[Sequence[Mapping[str, Any]]] = []

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return [ord(c) % 256 for c in text]

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        self.chats.append(messages)
        if messages[-1]["content"] == "no template":
            raise ValueError("the chat template refused these messages: it must alternate")
        return self.encode("".join(m["content"] for m in messages))

    def block_hashes(self, prompt_ids: Sequence[int]) -> tuple[bytes, ...]:
        return tuple(bytes([i]) * 32 for i in range(len(prompt_ids) // 16))


@dataclass
class Health:
    ok: bool = True
    reason: str = ""
    code: str = ""
    retry_after_s: float | None = None


Script = Callable[["FakeDriver", Request, GenerationWork, Sink], None]


def token(i: int, text: str, logprobs: int | None) -> TokenOutput:
    if logprobs is None:
        return TokenOutput(i, text)
    top = tuple(TokenLogprob(k, chr(97 + k), -1.0 - k) for k in range(logprobs))
    return TokenOutput(i, text, TokenLogprob(i, text, -0.5), top)


def letters(driver: FakeDriver, request: Request, work: GenerationWork, sink: Sink) -> None:
    """a, b, c, … until max_tokens or a stop string."""
    n = work.sampling.max_tokens
    for i in range(n):
        if not driver.alive(request.id):
            return
        text = chr(97 + i % 26)
        stopped = text in work.sampling.stop
        done = stopped or i == n - 1
        sink(
            Update(
                request.id,
                time.monotonic_ns(),
                token_ids=(97 + i,),
                payload=[token(97 + i, "" if stopped else text, work.sampling.logprobs)],
                outcome=Outcome.COMPLETED if done else Outcome.OPEN,
                finish=Finish.STOP if stopped else Finish.LENGTH if done else Finish.NONE,
                cached_tokens=16,
            )
        )
        if done:
            return
        time.sleep(driver.pause_s)


def hang(driver: FakeDriver, request: Request, work: GenerationWork, sink: Sink) -> None:
    """Nothing, until it is cancelled."""
    while driver.alive(request.id):
        time.sleep(0.002)


def ends(outcome: Outcome, reason: Reason, after: int = 0, **more: Any) -> Script:
    """Some tokens, then the given ending."""

    def script(driver: FakeDriver, request: Request, work: GenerationWork, sink: Sink) -> None:
        for i in range(after):
            sink(Update(request.id, 0, token_ids=(97 + i,), payload=[token(97 + i, chr(97 + i), None)]))
        time.sleep(driver.pause_s)
        sink(Update(request.id, 0, outcome=outcome, reason=reason, **more))

    return script


@dataclass
class FakeDriver:
    """Runs each request's script on a thread of its own."""

    script: Script = letters
    pause_s: float = 0.002
    metrics: Bins = field(default_factory=lambda: Bins("tiny"))
    requests: list[Request] = field(default_factory=list)
    works: list[GenerationWork] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    healthy: Health = field(default_factory=Health)
    waiting: tuple[int, int] = (0, 0)
    recorded: Recording | None = None
    _sinks: dict[str, Sink] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, request: Request, work: Any, sink: Sink) -> None:
        self.requests.append(request)
        self.works.append(work)
        with self._lock:
            self._sinks[request.id] = sink

        def run() -> None:
            self.script(self, request, work, sink)
            with self._lock:
                self._sinks.pop(request.id, None)

        threading.Thread(target=run, daemon=True).start()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            sink = self._sinks.pop(request_id, None)
        if sink is not None:
            self.cancelled.append(request_id)
            sink(Update(request_id, 0, outcome=Outcome.CANCELLED, reason=Reason.CLIENT_GONE))

    def alive(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._sinks

    @property
    def open(self) -> int:
        with self._lock:
            return len(self._sinks)

    def drain(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while self.open and time.monotonic() < end:
            time.sleep(0.005)
        return not self.open

    def health(self) -> Health:
        return self.healthy

    def backlog(self) -> tuple[int, int]:
        return self.waiting

    def snapshot(self) -> dict[str, Any]:
        return {
            "slot": 3,
            "policy": "fcfs",
            "running": self.open,
            "tenants": {"acme": {"weight": 3.0}, "labs": {"weight": 1.0}},
            "kv": {"total_blocks": 10},
        }

    def live(self, since: int, tenant: str | None) -> dict[str, Any]:
        return {"slot": since, "slots": [], "requests": []}

    def explain(self, request_id: str) -> dict[str, Any] | None:
        return self.documents.get(request_id)

    def recording(self) -> Recording | None:
        return self.recorded

    def recent(self, limit: int, tenant: str | None) -> list[dict[str, Any]]:
        found = [d for d in self.documents.values() if tenant is None or d["tenant"] == tenant]
        return found[:limit]
