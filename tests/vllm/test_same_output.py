"""Greedy output inside vLLM is what vLLM's default scheduler gives, whatever Kaiseki does with the requests.

One model, loaded once per kind of speculation; the scheduler is exchanged under it. Pools are so small, and
chunks so short, that requests are preempted and cut many times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs what needs vLLM")

from vllm import LLM, SamplingParams

from kaiseki.engines.vllm import KaisekiScheduler
from kaiseki.engines.vllm.board import Mode

OUTPUT = 24
TIE = 1e-2
"""Two best tokens whose logprobs are closer than this are a tie, which any schedule may break as it likes."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SETTINGS = {
    "classes": {
        "urgent": {"ttft_ms": 400, "tbt_ms": 60, "weight": 8},
        "normal": {"ttft_ms": 20_000, "tbt_ms": 2_000},
    },
    "memory": {"watermark_ratio": 1.0},
}


class Counted(KaisekiScheduler):
    """Counts preemptions."""

    stopped = 0

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.stopped += 1
        super()._preempt_request(*args, **kwargs)


def prompts() -> list[str]:
    rng = random.Random(3)
    words = ["river", "stone", "lamp", "window", "garden", "paper", "engine", "winter", "market", "bridge"]
    shared = " ".join(rng.choice(words) for _ in range(90))
    alone = [" ".join(rng.choice(words) for _ in range(20 + 18 * i)) for i in range(6)]
    return [*alone, *(f"{shared} {word} is a" for word in words[:6])]


def load(folder: Path, speculation: dict[str, Any] | None) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,  # the least that vLLM's CPU kernels take
        max_num_batched_tokens=96,
        max_num_seqs=8,
        speculative_config=speculation,
        disable_log_stats=False,
    )


@pytest.fixture(scope="module", params=[None, NGRAM], ids=["plain", "ngram"])
def llm(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[LLM]:
    from vllm.distributed import cleanup_dist_env_and_memory

    model = load(smollm2, request.param)
    yield model
    model.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def use(llm: LLM, cls: Any, blocks: int) -> Any:
    """Put a scheduler with so many blocks in the place of the one that is there."""
    core = llm.llm_engine.engine_core.engine_core
    old = core.scheduler
    config = old.vllm_config
    config.additional_config = {"kaiseki": SETTINGS}
    core.scheduler = cls(
        vllm_config=config,
        kv_cache_config=replace(old.kv_cache_config, num_blocks=blocks),
        structured_output_manager=core.structured_output_manager,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
        include_finished_set=False,
        log_stats=True,
    )
    core.scheduler.cache_config.num_gpu_blocks = blocks
    return core.scheduler


def generate(llm: LLM) -> list[Any]:
    """Outputs of the prompts; every third is urgent."""
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=OUTPUT,
            ignore_eos=True,
            logprobs=2,
            extra_args={"kaiseki_class": "normal" if i % 3 else "urgent"},
        )
        for i in range(len(prompts()))
    ]
    return [output.outputs[0] for output in llm.generate(prompts(), params, use_tqdm=False)]


def alike(a: Any, b: Any) -> str:
    """Empty if two outputs are the same up to a near tie, after which they may differ; else what differs."""
    assert len(a.token_ids) == len(b.token_ids) == OUTPUT
    for place, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
        first, second = sorted((one.logprob for one in a.logprobs[place].values()), reverse=True)[:2]
        if x != y:
            return "" if first - second < TIE else f"token {place}: {x} and {y}, {first - second:.3f} apart"
        if abs(a.logprobs[place][x].logprob - b.logprobs[place][x].logprob) > 1e-3:
            return f"token {place}: logprobs differ"
    return ""


@pytest.mark.model
@pytest.mark.slow
def test_output_is_the_default_schedulers(llm: LLM) -> None:
    core = llm.llm_engine.engine_core.engine_core
    default = type(core.scheduler)
    plain = generate(llm)

    for blocks in (21, 400):
        scheduler = use(llm, Counted, blocks)
        ours = generate(llm)
        assert scheduler.mode is Mode.KAISEKI, "it stepped aside"
        assert [alike(a, b) for a, b in zip(plain, ours, strict=True)] == [""] * len(plain)
        assert bool(scheduler.stopped) == (blocks == 21), f"{scheduler.stopped} preemptions"
    use(llm, default, 400)
    assert [alike(a, b) for a, b in zip(plain, generate(llm), strict=True)] == [""] * len(plain)
