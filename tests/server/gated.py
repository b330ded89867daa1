"""The HTTP server and the real driver on a scripted engine that runs a slot when it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.harness import SMALL, START_NS
from tests.server.fakes import FakeModel
from tests.server.served import GENEROUS_S

from kaiseki.config import parse
from kaiseki.core.decision import StepResult
from kaiseki.core.protocols import Capabilities
from kaiseki.core.scheduler import Scheduler
from kaiseki.cost.online import FixedLinear
from kaiseki.engines.clock import VirtualClock
from kaiseki.engines.driver import Driver
from kaiseki.engines.embedded.work import GenerationWork, TokenOutput
from kaiseki.engines.scripted import Script, ScriptedEngine
from kaiseki.memory.pool import BlockPool
from kaiseki.policies.registry import load
from kaiseki.server.app import create_app
from kaiseki.server.run import DrainingServer, bind, url_of

CHARACTERS_PER_TOKEN = 4


class Words(FakeModel):
    """Four characters are a token, as in English text; prompts share no prefix."""

    max_context = 1 << 20
    max_total_tokens = 1 << 20

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return [1] * -(-len(text) // CHARACTERS_PER_TOKEN)

    def block_hashes(self, prompt_ids: Sequence[int]) -> tuple[bytes, ...]:
        return ()


class GatedEngine(ScriptedEngine):
    """Answers what clients ask for; a slot ends only when `let` allows it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, SMALL, Capabilities())
        self._changed = threading.Condition()
        self._started, self._allowed = 0, 0.0

    def open(self, row: int, work: object) -> None:
        assert isinstance(work, GenerationWork)
        tokens = work.sampling.max_tokens
        super().open(row, Script(len(work.prompt_ids), tokens + 1, tokens, row))

    def collect(self) -> StepResult:
        with self._changed:
            self._started += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed >= self._started, GENEROUS_S)
        result = super().collect()
        ids = iter(result.token_ids.tolist())
        result.payloads = [tuple(TokenOutput(next(ids), "t") for _ in range(n)) for n in result.new_tokens]
        return result

    def let(self, slots: float) -> None:
        """Allow so many slots more."""
        with self._changed:
            self._allowed += slots
            self._changed.notify_all()

    def wait_started(self, slots: int) -> None:
        """Until so many slots have been started."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._started >= slots, GENEROUS_S)


@dataclass
class Gated:
    """What runs."""

    engine: GatedEngine
    driver: Driver
    model: Words
    url: str

    def gauges(self) -> dict[str, float]:
        """What /metrics says now."""
        page = httpx.get(f"{self.url}/metrics", timeout=GENEROUS_S).text
        samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
        kv = {f"kv_{s.labels['state']}": s.value for s in samples if s.name == "kaiseki_kv_blocks"}
        names = {"vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting"}
        return {names[s.name]: s.value for s in samples if s.name in names} | kv

    def ask(
        self, client: httpx.AsyncClient, prompt_tokens: int, max_tokens: int
    ) -> Awaitable[httpx.Response]:
        """Send a completion request."""
        text = "x" * (prompt_tokens * CHARACTERS_PER_TOKEN)
        body = {"model": "tiny", "prompt": text, "max_tokens": max_tokens, "ignore_eos": True}
        return asyncio.ensure_future(client.post(f"{self.url}/v1/completions", json=body))


def clients() -> httpx.AsyncClient:
    """As many connections as anybody wants."""
    return httpx.AsyncClient(timeout=GENEROUS_S, limits=httpx.Limits(max_connections=None))


async def until(condition: Callable[[], bool]) -> None:
    """Wait on the event loop."""
    async with asyncio.timeout(GENEROUS_S):
        while not condition():
            await asyncio.sleep(0.005)


@contextmanager
def gated(config: str, blocks: int = 4096, policy: str = "fcfs") -> Iterator[Gated]:
    """A server with these settings, until the end of the block."""
    settings = parse(config)
    clock, pool = VirtualClock(START_NS), BlockPool(blocks, 16)
    engine, model = GatedEngine(clock), Words()
    core = settings.scheduler_settings()
    scheduler = Scheduler(load(policy), pool, FixedLinear(SMALL), engine.capabilities, core, origin_ns=0)
    driver = Driver(scheduler, engine, clock)
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    server = DrainingServer(create_app(driver, model, settings, driver.backlog), 5.0, ready.set)
    url = url_of(listener)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    driver.start()
    thread.start()
    try:
        assert ready.wait(GENEROUS_S)
        yield Gated(engine, driver, model, url)
    finally:
        engine.let(float("inf"))
        server.should_exit = True
        thread.join(GENEROUS_S)
        driver.stop()
