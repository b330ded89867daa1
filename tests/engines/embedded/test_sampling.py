"""Sampling settings, each against transformers or against its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kaiseki.core.reasons import Finish
from kaiseki.engines.embedded import GenerationWork, SamplingParams
from kaiseki.engines.embedded.drawing import SORTED_FIRST, candidates, draw
from kaiseki.engines.embedded.rows import RowState
from kaiseki.engines.embedded.sampling import choose_all
from kaiseki.engines.embedded.text import TextCodec

PROMPT = [10, 20, 30, 40, 50, 60]
EOS = 256


def test_a_seed_gives_the_same_output_alone_and_in_company(hand: Callable[..., Any], output: Any) -> None:
    played = hand()
    alone = played.generate(PROMPT, temperature=1.5, seed=7, max_tokens=6)
    for row in range(4):
        played.open(row, PROMPT, temperature=1.5, seed=7 + row % 2, max_tokens=6)
    outs = [output() for _ in range(4)]
    for i in range(6):
        chunks = [(row, 0, 6, True) if i == 0 else (row, 5 + i, 1, True) for row in range(4)]
        result = played.step(chunks)
        for row, out in enumerate(outs):
            out.add(result, row)
    assert outs[0].ids == outs[2].ids == alone.ids
    assert outs[1].ids == outs[3].ids != alone.ids


def test_without_a_seed_outputs_differ(hand: Callable[..., Any]) -> None:
    played = hand()
    outs = [tuple(played.generate(PROMPT, temperature=5.0, max_tokens=8).ids) for _ in range(3)]
    assert len(set(outs)) > 1


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_one_candidate_left_is_greedy(hand: Callable[..., Any], settings: dict[str, Any]) -> None:
    played = hand()
    out = played.generate(PROMPT, temperature=1.0, **settings)
    assert out.ids == played.expected(PROMPT, 8)


def test_repetition_penalty_is_that_of_transformers(hand: Callable[..., Any]) -> None:
    played = hand()
    out = played.generate(PROMPT, repetition_penalty=0.4, max_tokens=16)
    assert out.ids == played.expected(PROMPT, 16, repetition_penalty=0.4)
    assert out.ids != played.expected(PROMPT, 16)


def test_min_tokens_is_that_of_transformers(hand: Callable[..., Any]) -> None:
    played = hand()
    first = played.expected(PROMPT, 1)[0]
    out = played.generate(PROMPT, min_tokens=3, stop_token_ids=(first,), max_tokens=12)
    assert out.ids == played.expected(PROMPT, 12, min_new_tokens=3, eos_token_id=[EOS, first])
    assert len(out.ids) >= 3


def test_presence_and_frequency_penalties(tokenizer: Any) -> None:
    logits = torch.linspace(0, 1, 32)
    params = SamplingParams(temperature=0, presence_penalty=0.1, frequency_penalty=0.4)
    state = RowState(GenerationWork(PROMPT, params), TextCodec(tokenizer), frozenset())
    for position, token in enumerate([31, 31, 30], len(PROMPT)):
        state.put(position, token)
    # 31 lies 0.032 above 30 and loses 0.9, 30 loses 0.5, and 29 nothing.
    for outputs, expected in ((0, 31), (3, 29)):
        (choice,) = choose_all(logits.unsqueeze(0), [state], [len(PROMPT) + outputs], TextCodec(tokenizer))
        assert choice.token == expected


@pytest.mark.parametrize("spread", [0.2, 3.0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_k": 700},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_distributions_are_those_of_transformers(spread: float, settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    logits = torch.randn(3, 4 * SORTED_FIRST, generator=torch.Generator().manual_seed(1)) * spread
    warped = logits / params.temperature
    for warper in (
        TopKLogitsWarper(params.top_k) if params.top_k else None,
        TopPLogitsWarper(params.top_p) if params.top_p < 1 else None,
        MinPLogitsWarper(params.min_p) if params.min_p else None,
    ):
        warped = warped if warper is None else warper(torch.empty(3, 0, dtype=torch.long), warped)
    for kept, expected in zip(
        candidates(logits / params.temperature, [params] * 3), torch.softmax(warped.double(), -1), strict=True
    ):
        ours = np.zeros(logits.shape[1])
        ours[kept.ids] = kept.weights / kept.weights.sum()
        assert np.abs(ours - expected.numpy()).max() < 1e-6


def test_draws_follow_the_weights() -> None:
    (kept,) = candidates(torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]])), [SamplingParams(top_k=3)])
    counts = np.bincount([draw(kept, seed, 5) for seed in range(4000)], minlength=4) / 4000
    assert np.abs(counts - np.array([0, 4, 2, 3]) / 9).max() < 0.03
    assert counts[0] == 0


def test_logprobs_are_those_of_the_model(hand: Callable[..., Any]) -> None:
    played = hand()
    out = played.generate(PROMPT, temperature=0.7, seed=3, repetition_penalty=1.3, logprobs=4, max_tokens=3)
    for i, given in enumerate(out.payloads):
        expected = torch.log_softmax(played.next_logits(PROMPT + out.ids[:i]), -1)
        assert given.chosen.token_id == given.token_id == out.ids[i]
        assert given.chosen.logprob == pytest.approx(float(expected[out.ids[i]]), abs=1e-4)
        values, ids = expected.topk(4)
        assert [t.token_id for t in given.top] == ids.tolist()
        assert [t.logprob for t in given.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert given.chosen.text == played.engine.codec.decode([out.ids[i]])


def test_logprobs_of_the_token_alone(hand: Callable[..., Any]) -> None:
    (given,) = hand().generate(PROMPT, logprobs=0, max_tokens=1).payloads
    assert given.chosen is not None
    assert given.top == ()


def test_how_outputs_end(hand: Callable[..., Any]) -> None:
    played = hand()
    greedy = played.expected(PROMPT, 8)
    assert played.generate(PROMPT).finish == Finish.LENGTH
    stopped = played.generate(PROMPT, stop_token_ids=(greedy[2],))
    assert stopped.finish == Finish.STOP
    assert stopped.ids == greedy[: greedy.index(greedy[2]) + 1]
    assert stopped.text == played.engine.codec.decode(stopped.ids[:-1]).rstrip("\N{REPLACEMENT CHARACTER}")


def test_ignore_eos(hand: Callable[..., Any], model: Callable[..., Any]) -> None:
    made = model("llama")
    made.generation_config.eos_token_id = made.generate(
        torch.tensor([PROMPT]), max_new_tokens=1, do_sample=False
    )[0, -1].item()
    played = hand(made)
    ended, forced = played.generate(PROMPT), played.generate(PROMPT, ignore_eos=True)
    assert (ended.finish, len(ended.ids), ended.text) == (Finish.STOP, 1, "")
    assert (forced.finish, len(forced.ids)) == (Finish.LENGTH, 8)


def test_a_row_whose_logits_are_not_finite_fails_alone(tokenizer: Any) -> None:
    codec = TextCodec(tokenizer)
    states = [
        RowState(GenerationWork(PROMPT, SamplingParams(temperature=t)), codec, frozenset())
        for t in (0.0, 0.0, 1.0, 0.0)
    ]
    logits = torch.zeros(4, 16)
    logits[:, 5] = 90.0
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    choices = choose_all(logits, states, [len(PROMPT)] * 4, codec)
    assert [c.token for c in choices] == [5, -1, -1, 5]
    assert [bool(c.error) for c in choices] == [False, True, True, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"min_tokens": 17},
        {"temperature": -1},
        {"top_p": 0},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"logprobs": -1},
        {"stop": ("",)},
    ],
)
def test_meaningless_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
