"""What breaks one row must not touch the others, and what we can't do is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kaiseki.engines.embedded import EmbeddedEngine, UnsupportedModel, sampling

GOOD = [10, 20, 30, 40, 50]
BEYOND_VOCABULARY = [10, 20, 9999]
SMALL = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def test_an_exception_fails_only_the_row_that_raises(hand: Callable[..., Any]) -> None:
    played = hand()
    for row, prompt in enumerate([GOOD, BEYOND_VOCABULARY, GOOD]):
        played.open(row, prompt, max_tokens=2)
    result = played.step([(0, 0, 5, True), (1, 0, 3, True), (2, 0, 5, True)])
    assert result.failed.tolist() == [False, True, False]
    assert not result.retryable.any()
    assert "IndexError" in result.message
    assert result.new_tokens.tolist() == [1, 0, 1]
    first, second = played.expected(GOOD, 2)
    assert result.token_ids.tolist() == [first, first]
    result = played.step([(0, 5, 1, True), (2, 5, 1, True)])
    assert result.token_ids.tolist() == [second, second]


def test_a_failed_row_fails_again_in_the_step_in_flight(hand: Callable[..., Any]) -> None:
    played = hand(depth=1)
    played.open(0, BEYOND_VOCABULARY)
    played.execute([(0, 0, 3, True)])
    played.execute([(0, 3, 1, True)])
    for _ in range(2):
        result = played.engine.collect()
        assert result.failed.tolist() == [True]
        assert result.new_tokens.tolist() == [0]


def test_nan_weights_fail_only_the_rows_that_use_them(hand: Callable[..., Any], model: Any) -> None:
    made = model("llama")
    played = hand(made)
    with torch.no_grad():
        made.get_input_embeddings().weight[77] = float("nan")
    played.open(0, GOOD, max_tokens=1)
    played.open(1, [10, 77, 30], max_tokens=1)
    played.open(2, [*GOOD, 60], max_tokens=1)
    result = played.step([(0, 0, 5, True), (1, 0, 3, True), (2, 0, 6, True)])
    assert result.failed.tolist() == [False, True, False]
    assert "not finite" in result.message
    assert result.token_ids.tolist() == [*played.expected(GOOD, 1), *played.expected([*GOOD, 60], 1)]


def test_an_error_in_sampling_fails_only_its_row(
    hand: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    penalise = sampling._penalise

    def picky(row: Any, state: Any, position: int) -> None:
        if state.seed == 13:
            raise RuntimeError("unlucky")
        penalise(row, state, position)

    monkeypatch.setattr(sampling, "_penalise", picky)
    played = hand()
    for row, seed in enumerate((12, 13, 14)):
        played.open(row, GOOD, seed=seed, top_k=1, temperature=1.0)
    result = played.step([(row, 0, 5, True) for row in range(3)])
    assert result.failed.tolist() == [False, True, False]
    assert "unlucky" in result.message
    assert result.token_ids.tolist() == played.expected(GOOD, 1) * 2


def test_stop_tokens_beyond_the_vocabulary_change_nothing(hand: Callable[..., Any]) -> None:
    played = hand()
    out = played.generate(GOOD, stop_token_ids=(10**6, -1), min_tokens=3)
    assert out.ids == played.expected(GOOD, 8)


def test_an_error_of_the_whole_step_comes_back_as_a_result(hand: Callable[..., Any]) -> None:
    played = hand()
    played.open(0, GOOD)
    result = played.step([(0, 0, 5, True)], copies=[(0, 10**6)])
    assert result.failed.tolist() == [True]
    assert result.started_ns <= result.ended_ns


def test_a_step_without_rows(hand: Callable[..., Any]) -> None:
    from kaiseki.core.decision import Decision, empty_i32

    engine = hand().engine
    engine.execute(Decision(0, empty_i32(), empty_i32(), empty_i32(), np.empty(0, bool), empty_i32()))
    assert engine.collect().rows.size == 0


def test_an_empty_prompt_is_refused(hand: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        hand().open(0, [])


def test_sliding_windows_are_refused(hand: Callable[..., Any]) -> None:
    windowed = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(UnsupportedModel, match="sliding_attention"):
        hand(Qwen2ForCausalLM(windowed))
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        hand(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)))


def test_rotary_embeddings_that_depend_on_the_batch_are_refused(
    hand: Callable[..., Any], model: Callable[..., Any]
) -> None:
    made = model("llama")
    made.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="dynamic"):
        hand(made)


def test_attention_that_is_not_what_we_compute_is_noticed(hand: Callable[..., Any], model: Any) -> None:
    """State outside the attention layers: each token also sees the one before it in the batch."""
    made = model("llama")
    mlp = made.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + x.roll(1, dims=1)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        hand(made)


def test_settings_out_of_range(hand: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="depth"):
        hand(depth=2)
    with pytest.raises(ValueError, match="dtype"):
        EmbeddedEngine.load("nowhere", tables=None, blocks=8, dtype="float16")  # type: ignore[arg-type]
