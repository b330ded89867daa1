"""From logits to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kaiseki.core.decision import I32
from kaiseki.engines.embedded.rows import RowState
from kaiseki.engines.embedded.text import TextCodec
from kaiseki.engines.embedded.work import SamplingParams, TokenLogprob

SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen for a row, with log-probabilities if asked for; `error` says why there is none."""

    token: int
    error: str = ""
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


def choose_all(
    logits: torch.Tensor, states: list[RowState], positions: list[int], codec: TextCodec
) -> list[Choice]:
    """Choose a token per row of `logits`, float32[n, vocabulary], for these positions of these rows.

    A choice depends on the row's own logits, tokens and seed only, so it is the same in any batch, and
    again after a preemption.
    """
    best = logits.argmax(-1).tolist()
    finite = torch.isfinite(logits.sum(-1)).tolist()
    choices = []
    for i, (state, position) in enumerate(zip(states, positions, strict=True)):
        if not finite[i]:
            choices.append(Choice(-1, "the model's logits are not finite"))
            continue
        try:
            token = int(best[i]) if _plain(state, position) else choose(logits[i], state, position)
            choices.append(_with_logprobs(logits[i], token, state.sampling.logprobs, codec))
        except Exception as error:  # one row's settings must not stop the others
            choices.append(Choice(-1, f"sampling failed: {error}"))
    return choices


def choose(logits: torch.Tensor, state: RowState, position: int) -> int:
    """Choose a token for one row from its logits, float32[vocabulary]."""
    params = state.sampling
    scores = logits.clone().unsqueeze(0)
    if params.penalised:
        scores = _penalise(scores, params, state.history(position), state.outputs(position))
    if position - state.prompt < params.min_tokens and state.ending:
        scores[:, sorted(state.ending)] = float("-inf")
    if params.temperature == 0:
        return int(scores.argmax())
    history = torch.from_numpy(state.history(position).astype(np.int64)).unsqueeze(0)
    scores = warpers(params)(cast(torch.LongTensor, history), scores)
    return _draw(scores[0], state.seed, position - state.prompt)


def warpers(params: SamplingParams) -> LogitsProcessorList:
    """The processors that shape the distribution, in transformers' order."""
    found = LogitsProcessorList()
    if params.temperature != 1:
        found.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(float(params.top_p)))
    if params.min_p > 0:
        found.append(MinPLogitsWarper(float(params.min_p)))
    return found


def _plain(state: RowState, position: int) -> bool:
    """Whether the most likely token is the one to take."""
    params = state.sampling
    masked = position - state.prompt < params.min_tokens and bool(state.ending)
    return params.temperature == 0 and not params.penalised and not masked


def _penalise(scores: torch.Tensor, params: SamplingParams, history: I32, outputs: I32) -> torch.Tensor:
    """Penalise [1, vocabulary] scores: repetition by transformers, the others as OpenAI defines them."""
    if params.repetition_penalty != 1:
        ids = torch.from_numpy(history.astype(np.int64)).unsqueeze(0)
        scores = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, scores)
    if outputs.size and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(outputs, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        scores[0, torch.from_numpy(seen.astype(np.int64))] -= torch.from_numpy(penalty.astype(np.float32))
    return scores


def _draw(scores: torch.Tensor, seed: int, index: int) -> int:
    """Sample from softmax(scores), float32[vocabulary], with the index-th number of the seed's stream.

    Random numbers are addressed, not consumed: computing an output position again draws the same one.
    """
    stream = np.random.Generator(np.random.Philox(key=seed & SEED_MASK, counter=index))
    total = torch.softmax(scores, -1).double().cumsum(-1)
    return int(torch.searchsorted(total, total[-1:] * stream.random(), right=True))


def _with_logprobs(logits: torch.Tensor, token: int, top: int | None, codec: TextCodec) -> Choice:
    """Add log-probabilities of the model alone, before any processor, if wanted."""
    if top is None:
        return Choice(token)
    logprobs = torch.log_softmax(logits, -1)
    values, ids = logprobs.topk(min(top, logprobs.numel()))

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id, codec.decode([token_id]), logprob)

    best = tuple(entry(int(i), float(v)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
    return Choice(token, chosen=entry(token, float(logprobs[token])), top=best)
