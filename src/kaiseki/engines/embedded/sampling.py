"""From logits to tokens, for all rows of a step at once.

A token depends on its row's own logits, tokens and seed only, so it is the same in any batch, and again
when a preempted row is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from kaiseki.engines.embedded.drawing import candidates, draw
from kaiseki.engines.embedded.rows import RowState
from kaiseki.engines.embedded.text import TextCodec
from kaiseki.engines.embedded.work import TokenLogprob


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen for a row, with log-probabilities if asked for; `error` says why there is none."""

    token: int
    error: str = ""
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


NOT_FINITE = Choice(-1, "the model's logits are not finite")


def choose_all(
    logits: torch.Tensor, states: list[RowState], positions: list[int], codec: TextCodec
) -> list[Choice]:
    """Choose a token per row of `logits`, float32[n, vocabulary], for these positions of these rows."""
    tokens = logits.argmax(-1).tolist()
    finite = torch.isfinite(logits.sum(-1)).tolist()
    special = [i for i in range(len(states)) if finite[i] and not _plain(states[i], positions[i])]
    if special:
        rows, where = [states[i] for i in special], [positions[i] for i in special]
        for i, token in zip(special, _choose_special(logits[special], rows, where), strict=True):
            tokens[i] = token
    return [
        _with_logprobs(logits[i], tokens[i], state.sampling.logprobs, codec) if finite[i] else NOT_FINITE
        for i, state in enumerate(states)
    ]


def _plain(state: RowState, position: int) -> bool:
    """Whether the most likely token is the one to take."""
    return state.sampling.greedy and not state.sampling.penalised and not _masked(state, position)


def _masked(state: RowState, position: int) -> bool:
    """Whether tokens that would end the output are still ruled out."""
    return position - state.prompt < state.sampling.min_tokens and bool(state.ending)


def _choose_special(scores: torch.Tensor, states: list[RowState], positions: list[int]) -> list[int]:
    """Tokens of rows with penalties, masks or sampling. `scores`, float32[n, vocabulary], is overwritten."""
    for row, state, position in zip(scores, states, positions, strict=True):
        _penalise(row, state, position)
        if _masked(state, position):
            row[[token for token in state.ending if 0 <= token < row.numel()]] = float("-inf")
    tokens = scores.argmax(-1).tolist()
    drawn = [i for i, state in enumerate(states) if not state.sampling.greedy]
    if drawn:
        params = [states[i].sampling for i in drawn]
        scaled = scores[drawn] / torch.tensor([[p.temperature] for p in params])
        for i, kept in zip(drawn, candidates(scaled, params), strict=True):
            tokens[i] = draw(kept, states[i].seed, positions[i] - states[i].prompt)
    return [int(token) for token in tokens]


def _penalise(row: torch.Tensor, state: RowState, position: int) -> None:
    """Penalise one row in place: repetition as transformers does, the others as OpenAI defines them."""
    params = state.sampling
    if params.repetition_penalty != 1:
        ids = torch.from_numpy(state.history(position).astype(np.int64)).unsqueeze(0)
        penalise = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        row.copy_(penalise(ids, row.unsqueeze(0))[0])
    outputs = state.outputs(position)
    if outputs.size and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(outputs, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        row[torch.from_numpy(seen.astype(np.int64))] -= torch.from_numpy(penalty.astype(np.float32))


def _with_logprobs(logits: torch.Tensor, token: int, top: int | None, codec: TextCodec) -> Choice:
    """Add log-probabilities of the model alone, before penalties and temperature, if wanted."""
    if top is None:
        return Choice(token)
    logprobs = torch.log_softmax(logits, -1)
    values, ids = logprobs.topk(min(top, logprobs.numel()))

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id, codec.decode([token_id]), logprob)

    best = tuple(entry(int(i), float(v)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
    return Choice(token, chosen=entry(token, float(logprobs[token])), top=best)
