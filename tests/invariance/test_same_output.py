"""Whatever the schedule, greedy output is token for token the same (N5)."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.invariance.schedules import Chaos, Jobs, check_schedule, differences, reference, run_schedule
from tests.tiny_models import SIZES, byte_tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from kaiseki.core.reasons import Finish
from kaiseki.engines.embedded import EmbeddedEngine
from kaiseki.engines.embedded.rows import RowState
from kaiseki.memory.pool import BlockPool

FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SIZES, no_rope_layers=[1, 0])),
}
OUTPUT = 12
HOST = 16
"""Blocks of host memory, for KV that is swapped."""
Tiny = tuple[Any, Jobs]


def tiny_jobs(model: Any, seed: int) -> Jobs:
    """Prompts of 1 to 90 tokens, some with a common beginning, some asked for more than once."""
    rng = random.Random(seed)
    common = [rng.randrange(200) for _ in range(24)]
    jobs = []
    for i in range(8):
        own = [rng.randrange(200) for _ in range(rng.choice((1, 7, 16, 33, 66)))]
        prompt = (common if i % 2 else []) + own
        jobs.append((reference(model, prompt, OUTPUT), 3 if i in (1, 4) else 1))
    return jobs


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    torch.manual_seed(0)
    model = FAMILIES[request.param]().eval()
    return model, tiny_jobs(model, 1)


def engine_over(model: Any, pool: BlockPool, depth: int) -> EmbeddedEngine:
    return EmbeddedEngine(
        copy.deepcopy(model),  # the engine makes it over
        byte_tokenizer(),
        tables=pool,
        blocks=pool.total_blocks,
        block_tokens=pool.block_tokens,
        host_blocks=HOST,
        threads=1,
        depth=depth,
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_tiny_models_under_random_schedules(tiny: tuple[Any, Jobs], depth: int) -> None:
    """Ten random schedules at each depth: 20 for each of three families, on a pool that is too small.

    Half of those that are stopped are swapped to host memory, where there is room, and half computed again.
    """
    model, jobs = tiny
    pool = BlockPool(20, 8, placement="runs" if depth else "pages", host_blocks=HOST)
    engine = engine_over(model, pool, depth)
    preempted = swapped = cached = 0
    for seed in range(10):
        out, _ = check_schedule(engine, pool, jobs, Chaos(seed))
        preempted += out.preemptions
        swapped += out.swaps
        cached += out.cached
    engine.shutdown()
    assert preempted > 20, "the schedules were too tame to show anything"
    assert swapped > 5, "hardly anything was swapped"
    assert cached > 0, "no prefix was ever shared"


class AppendingRow(RowState):
    """A row that appends what it samples, instead of writing it where it belongs.

    What a step in flight samples for a request that is preempted meanwhile then stays, one place before
    the token that is sampled for the same position again.
    """

    def put(self, position: int, token: int) -> tuple[str, Finish]:
        end = getattr(self, "end", self.prompt)
        self.end = end + 1
        self.tokens[min(end, self.tokens.size - 1)] = token
        done = position + 1 - self.prompt >= self.sampling.max_tokens
        return "", Finish.LENGTH if done else Finish.NONE


def test_a_broken_engine_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stale tokens kept after preemption, some schedule gives another output."""
    torch.manual_seed(0)
    model = FAMILIES["llama"]().eval()
    jobs = tiny_jobs(model, 1)
    pool = BlockPool(20, 8, host_blocks=HOST)
    engine = engine_over(model, pool, depth=1)
    monkeypatch.setattr("kaiseki.engines.embedded.engine.RowState", AppendingRow)
    tame = differences(jobs, run_schedule(engine, pool, jobs, Chaos(0, preempt=0.0, batch=2)))[0]
    wild = differences(jobs, run_schedule(engine, pool, jobs, Chaos(1, preempt=0.5)))[0]
    engine.shutdown()
    assert not tame, "without preemption even the broken engine is right"
    assert wild


QUESTIONS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "List three fruits that are yellow.",
    "Write a short greeting for a new colleague.",
    "How many days are there in a leap year, and why?",
    "Give me a rhyme for the word 'cloud'.",
    "What does a scheduler in an operating system do?",
    "Translate 'good morning' into Spanish.",
    "Name a river in South America.",
    "What is the difference between a list and a tuple in Python?",
    "Suggest a name for a small bakery by the sea.",
    "Why do leaves change colour in autumn?",
    "Give one tip for falling asleep faster.",
    "What is 12 times 12?",
    "Describe the taste of an apple.",
)


def natural_jobs(model: Any, engine: EmbeddedEngine, pages: int) -> Jobs:
    """Fifteen questions and one document of `pages` pages (of 16 tokens)."""
    chats = [engine.render_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    text = Path(random.__file__).read_text(encoding="utf-8")[: pages * 80]
    document = engine.encode(text)[: pages * 16 - 8]
    assert len(document) > (pages - 1) * 16
    jobs = [(reference(model, prompt, 16), 2 if i == 3 else 1) for i, prompt in enumerate(chats)]
    return [*jobs, (reference(model, document, 8), 1)]


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_under_random_schedules(smollm2: Path) -> None:
    """Two schedules on the real model, 16 natural prompts, one of which spans 100 pages."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, local_files_only=True)
    pool = BlockPool(160, 16)
    engine = EmbeddedEngine.load(smollm2, tables=pool, blocks=160, threads=1, depth=1)
    jobs = natural_jobs(model, engine, 100)
    ties = preempted = 0
    for seed in (1, 2):
        out, near = check_schedule(engine, pool, jobs, Chaos(seed, preempt=0.1, budget=400, batch=8))
        ties += near
        preempted += out.preemptions
    engine.shutdown()
    assert preempted > 0
    assert ties <= 4, f"{ties} near-ties in two schedules: more than chance explains"
