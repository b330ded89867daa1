"""Model folders, element types, and getting ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kaiseki.engines.embedded import EmbeddedEngine, GenerationWork, SamplingParams

PROMPT = [10, 20, 30, 40, 50, 60]


def test_a_folder_is_loaded_as_it_was_saved(
    hand: Callable[..., Any], model: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    played = hand("qwen3")
    model("qwen3").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = EmbeddedEngine.load(tmp_path, tables=played.tables, blocks=144, block_tokens=4, threads=1)
    assert engine.eos == {256}
    assert engine.capabilities.max_context_tokens == 256
    assert engine.encode("hi") == tokenizer.encode("hi")
    played.engine, expected = engine, played.generate(PROMPT).ids
    assert played.generate(PROMPT).ids == expected
    engine.shutdown()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_stays_close_to_the_model_in_bfloat16(
    hand: Callable[..., Any], model: Callable[..., Any], family: str
) -> None:
    played = hand(model(family).bfloat16())
    prompt = [(7 * i) % 256 for i in range(40)]
    played.open(0, prompt, logprobs=5, max_tokens=2)
    played.step([(0, 0, 17, False)])
    played.step([(0, 17, 3, False)])
    for start, tokens in ((20, 20), (40, 1)):
        (given,) = played.step([(0, start, tokens, True)]).payloads[0]
        expected = torch.log_softmax(played.next_logits(prompt).float(), -1)
        assert given.chosen.logprob == pytest.approx(float(expected[given.token_id]), abs=0.2)
        assert given.chosen.logprob == pytest.approx(float(expected.max()), abs=0.2)
        prompt = [*prompt, given.token_id]


def test_warm_up_leaves_a_working_engine(hand: Callable[..., Any]) -> None:
    played = hand()
    played.engine.warm_up(tokens=40)
    assert played.generate(PROMPT).ids == played.expected(PROMPT, 8)


def test_times_are_those_of_the_clock(hand: Callable[..., Any]) -> None:
    ticks = iter(range(100, 200))
    played = hand(clock=lambda: next(ticks))
    played.engine.open(0, GenerationWork(PROMPT, SamplingParams()))
    played.epochs[0] = 0
    result = played.step([(0, 0, 6, False)])
    assert (result.started_ns, result.ended_ns) == (100, 101)
