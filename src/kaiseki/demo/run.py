"""The demonstration from the first measurement to the last policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kaiseki.demo.attainment import Targets, policy_figures
from kaiseki.demo.client import Clients
from kaiseki.demo.explained import find_instructive
from kaiseki.demo.load import Load, make_load, mixed
from kaiseki.demo.measure import BUDGETS, Measured, measure, sustainable_work
from kaiseki.demo.narrator import Narrator
from kaiseki.demo.prompts import BATCH, INTERACTIVE, Encode, PromptMaker
from kaiseki.demo.replay import replay
from kaiseki.demo.serving import KEYS, Launch, settings

BASELINES = ("fcfs", "priority")
OURS = "kaiseki"
START_S = 25.0
MEASURE_S = 30.0
PAUSE_S = 1.0
"""Between two loads on one server, for it to notice what was cut off."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for.

    Attributes:
        model: what `kaiseki serve` is told.
        seeds: one load per seed.
        seconds: span of arrivals.
        full: the baselines try every budget.
        closed_loop_s: how long the sustainable rate is measured.
        lone_requests: interactive and batch requests measured alone.
    """

    model: str
    seeds: tuple[int, ...] = (1,)
    seconds: float = 90.0
    full: bool = False
    closed_loop_s: float = 15.0
    lone_requests: tuple[int, int] = (9, 3)


@dataclass(slots=True)
class Findings:
    """What came out: measurements, the loads, and the figures of each policy, budget and seed."""

    measured: Measured
    budget: int
    sustainable: float = 0.0
    loads: list[Load] = field(default_factory=list)
    figures: dict[str, dict[int | None, list[dict[str, Any]]]] = field(default_factory=dict)
    explained: dict[str, Any] | None = None
    wall_s: float = 0.0


class Demo:
    """One run.

    Args:
        options: what was asked for.
        launch: starts servers.
        encode: the model's tokenizer.
        narrator: tells people how far it is.
        clients: makes the clients of a server, from its URL, the model's name and the keys.
    """

    def __init__(
        self,
        options: Options,
        launch: Launch,
        encode: Encode,
        narrator: Narrator,
        clients: Callable[[str, str, Mapping[str, str]], Clients] = Clients,
    ) -> None:
        self._options = options
        self._launch = launch
        self._encode = encode
        self._narrator = narrator
        self._clients = clients

    async def run(self) -> Findings:
        """Everything, one server after the other.

        Raises:
            ServerFailed: a server did not start or ended early.
            MeasureError: the idle server did not answer.
        """
        began = time.monotonic()
        found = await self._measure()
        for policy in (*BASELINES, OURS):
            for budget in self._budgets(policy, found.budget):
                await self._policy(policy, budget, found)
        found.wall_s = time.monotonic() - began
        return found

    def _budgets(self, policy: str, picked: int) -> Sequence[int | None]:
        if policy == OURS:
            return (None,)
        # The picked one comes first, since the sustainable rate is measured with it.
        return (picked, *(b for b in BUDGETS if b != picked)) if self._options.full else (picked,)

    @asynccontextmanager
    async def _server(
        self, policy: str, budget: int | None, targets: Mapping[str, Targets] | None
    ) -> AsyncIterator[Clients]:
        """A server of this policy, and clients that have asked it something already."""
        wanted = settings(self._options.model, policy, budget, targets)
        tokens = "" if budget is None else f", {budget} tokens per slot"
        maker = PromptMaker(self._encode, seed=0)
        async with AsyncExitStack() as stack:
            with self._narrator.step(f"starting a server: {policy}{tokens}", START_S):
                url = await stack.enter_async_context(self._launch(wanted))
                client = self._clients(url, model_name(self._options.model), KEYS)
                clients = await stack.enter_async_context(client)
                for cls in (BATCH, INTERACTIVE):
                    await clients.ask(maker.make(cls))
            yield clients

    async def _measure(self) -> Findings:
        options = self._options
        async with self._server("fcfs", None, None) as clients:
            text = "measuring single requests and eight at once on the idle machine"
            with self._narrator.step(text, MEASURE_S):
                maker = PromptMaker(self._encode, seed=10**6)
                measured = await measure(clients, maker, options.lone_requests)
        budget = measured.budget()
        self._say_measured(measured, budget)
        return Findings(measured, budget)

    async def _policy(self, policy: str, budget: int | None, found: Findings) -> None:
        targets = found.measured.targets
        runs = found.figures.setdefault(policy, {}).setdefault(budget, [])
        async with self._server(policy, budget, targets) as clients:
            if not found.loads:
                await self._make_loads(clients, found)
            for seed, load in zip(self._options.seeds, found.loads, strict=True):
                counted = f", seed {seed}" if len(found.loads) > 1 else ""
                text = f"{policy}: {len(load.arrivals)} requests arrive over {load.seconds:.0f} s{counted}"
                with self._narrator.step(text, load.seconds + found.measured.deadline_ms / 1000):
                    came = await replay(clients, load, targets)
                figures = policy_figures(came.answers, targets, came.start_ms, load.seconds)
                runs.append(figures | {"latest_send_s": came.latest_send_s})
                if policy == OURS and found.explained is None:
                    found.explained = await find_instructive(clients, came.answers, targets)
                await asyncio.sleep(PAUSE_S)

    async def _make_loads(self, clients: Clients, found: Findings) -> None:
        options, lone = self._options, found.measured.lone
        with self._narrator.step(
            "measuring the rate that fcfs sustains with this mix", options.closed_loop_s
        ):
            prompts = mixed(PromptMaker(self._encode, seed=10**6 + 1), lone)
            found.sustainable = await sustainable_work(clients, prompts, lone, options.closed_loop_s)
        await asyncio.sleep(PAUSE_S)
        for seed in options.seeds:
            maker = PromptMaker(self._encode, seed)
            found.loads.append(make_load(maker, lone, found.sustainable, options.seconds, seed))

    def _say_measured(self, measured: Measured, budget: int) -> None:
        say = self._narrator.say
        say(
            f"alone, a chat of {measured.median_prompt[0]} tokens starts after {measured.prefill_ms:.0f} ms, "
            f"a document of {measured.median_prompt[1]} tokens is explained after "
            f"{measured.batch_ms / 1000:.1f} s; a step of eight takes {measured.step_ms:.0f} ms"
        )
        say(
            f"targets: interactive first token {measured.ttft_target_ms:.0f} ms (5x), "
            f"gaps {measured.tbt_target_ms:.0f} ms (2x a step of eight); "
            f"batch {measured.deadline_ms / 1000:.1f} s to the last token (5x its median lone time)"
        )
        if self._options.full:
            say(f"token budgets of the baselines: {', '.join(map(str, BUDGETS))}, the best of each is shown")
        else:
            say(f"token budget of the baselines: {budget}, {reason_for(measured, budget)}")


def reason_for(measured: Measured, budget: int) -> str:
    """Why this budget was picked."""
    slot = measured.slot_ms(budget)
    if slot <= measured.tbt_target_ms:
        return f"the largest whose slot with eight decodes is predicted within the gap target ({slot:.0f} ms)"
    return f"the smallest: none keeps a slot with eight decodes within the gap target ({slot:.0f} ms)"


def model_name(model: str) -> str:
    """What the server's API calls a model."""
    return Path(model).name.removesuffix(".gguf")
