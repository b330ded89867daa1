"""A step that raises on the real engine: who is hit tries again or ends, and nobody else's output changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_models import build, byte_tokenizer

from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.cost.online import FixedLinear
from kaiseki.engines.driver import Driver
from kaiseki.engines.embedded import EmbeddedEngine, GenerationWork, SamplingParams
from kaiseki.engines.recovery import Recovery
from kaiseki.engines.updates import Update
from kaiseki.memory.pool import BlockPool
from kaiseki.policies.registry import load

OUTPUT = 12
POISON = 263
"""A token of the vocabulary that no text has."""
PROMPTS = {f"r{i}": np.random.default_rng(i).integers(0, 250, 9 + 11 * i).tolist() for i in range(4)}


class Served:
    """A driver on a tiny Llama, and what its clients were told."""

    def __init__(self, depth: int, max_retries: int = 2) -> None:
        self.model = build("llama")
        self.pool = BlockPool(128, 4)
        self.engine = EmbeddedEngine(
            self.model,
            byte_tokenizer(),
            tables=self.pool,
            blocks=128,
            block_tokens=4,
            threads=1,
            depth=depth,
        )
        cost = FixedLinear(np.array([1e6, 1e5, 0.0, 1e5, 1.0, 1.0, 0.0]))
        policy = load("sarathi", budget_tokens=24)  # several steps per prompt, decodes beside them
        self.scheduler = Scheduler(policy, self.pool, cost, self.engine.capabilities)
        self.driver = Driver(self.scheduler, self.engine, recovery=Recovery(max_retries))
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Update] = {}

    def run(self, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        for name, prompt in prompts.items():
            sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
            request = Request(name, len(prompt), OUTPUT)
            self.driver.submit(request, GenerationWork(tuple(prompt), sampling), self._take)
        self.driver.run_until_idle()
        assert self.pool.free_blocks() == self.pool.total_blocks, "blocks leaked"
        assert self.scheduler.table.open_rows == 0, "rows leaked"
        assert self.driver.health().ok
        return self.tokens

    def _take(self, update: Update) -> None:
        self.tokens.setdefault(update.request_id, []).extend(update.token_ids)
        if update.outcome != Outcome.OPEN:
            self.ends[update.request_id] = update


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(*args: Any, **more: Any) -> Served:
        made.append(Served(*args, **more))
        return made[-1]

    yield make
    for served in made:
        served.engine.shutdown()


@contextmanager
def raising(
    served: Served, when: Callable[[int, torch.Tensor], bool], error: Exception
) -> Iterator[list[int]]:
    """The second layer raises when told by (number of the forward, token ids). Some KV is written by then."""
    inner, layer = served.model.model, served.model.model.layers[1]
    forwards, fired = [0], [0]
    ids: list[torch.Tensor] = [torch.empty(0)]
    embed, forward = inner.embed_tokens.forward, layer.forward

    def noting(input_ids: torch.Tensor) -> Any:
        forwards[0] += 1
        ids[0] = input_ids
        return embed(input_ids)

    def faulty(*args: Any, **more: Any) -> Any:
        if when(forwards[0], ids[0]):
            fired[0] += 1
            raise error
        return forward(*args, **more)

    inner.embed_tokens.forward, layer.forward = noting, faulty
    yield fired
    inner.embed_tokens.forward, layer.forward = embed, forward


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    served = Served(0)
    tokens = served.run(PROMPTS)
    served.engine.shutdown()
    assert all(len(t) == OUTPUT for t in tokens.values())
    return tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at", [1, 2, 4, 7, 12], ids=lambda n: f"forward {n}")
def test_a_forward_that_raises_once_changes_no_output(
    serve: Callable[..., Served], undisturbed: dict[str, list[int]], depth: int, at: int
) -> None:
    served = serve(depth)
    with raising(served, lambda n, ids: n == at, RuntimeError("out of something")) as fired:
        assert served.run(PROMPTS) == undisturbed
    assert fired == [1]
    assert all(u.outcome == Outcome.COMPLETED for u in served.ends.values())


@pytest.mark.parametrize("depth", [0, 1])
def test_a_lone_request_is_computed_again(
    serve: Callable[..., Served], undisturbed: dict[str, list[int]], depth: int
) -> None:
    served = serve(depth)
    with raising(served, lambda n, ids: n == 6, RuntimeError("out of something")) as fired:
        assert served.run({"r3": PROMPTS["r3"]})["r3"] == undisturbed["r3"]
    assert fired == [1]
    events = [e["event"] for e in served.driver.explain("r3")["timeline"]]
    assert events.count("retried") == 1


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("error", "attempts"), [(RuntimeError("again"), 3), (MemoryError(), 3), (ValueError("never"), 1)]
)
def test_a_request_that_always_breaks_the_step_ends_alone(
    serve: Callable[..., Served],
    undisturbed: dict[str, list[int]],
    depth: int,
    error: Exception,
    attempts: int,
) -> None:
    served = serve(depth, max_retries=2)
    prompts = PROMPTS | {"poison": [7] * 30 + [POISON] + [9] * 5}
    with raising(served, lambda n, ids: bool((ids == POISON).any()), error):
        tokens = served.run(prompts)
    end = served.ends["poison"]
    assert (end.outcome, end.reason) == (Outcome.FAILED, Reason.ENGINE_ERROR)
    assert end.numbers == {"attempts": attempts}
    # With two steps in flight the second fails because the first did, which is no attempt of its own.
    events = [e["event"] for e in served.driver.explain("poison")["timeline"]]
    assert events.count("retried") == attempts - 1
    assert tokens.pop("poison") == []
    assert tokens == undisturbed
