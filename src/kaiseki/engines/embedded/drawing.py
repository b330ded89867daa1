"""Top-k, top-p, min-p, and the draw among what they keep.

The definitions are those of transformers' warpers, in their order (temperature, top-k, top-p, min-p).
They are not used because they sort the whole vocabulary for every row, which takes longer than the
model: sorting the best few hundred tokens is enough unless the distribution is very flat.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kaiseki.core.decision import F64, I64
from kaiseki.engines.embedded.work import SamplingParams

SEED_MASK = 2**64 - 1
SORTED_FIRST = 256
"""How many of the best tokens are looked at before all are sorted."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens to draw from, in increasing order of id, with weights that need not add up to 1.

    The order is by id so that tiny differences between two batches' logits can't reorder it.
    """

    ids: I64
    weights: F64


def candidates(scores: torch.Tensor, params: list[SamplingParams]) -> list[Candidates]:
    """What is kept of each row of `scores`, float32[n, vocabulary], divided by the temperature already."""
    vocab = scores.shape[-1]
    totals = torch.logsumexp(scores, -1).tolist()
    filtered = [i for i, p in enumerate(params) if _filters(p, vocab)]
    found = [Candidates(np.empty(0, np.int64), np.empty(0))] * len(params)
    if filtered:
        most = min(vocab, max(SORTED_FIRST, *(params[i].top_k for i in filtered)))
        best, order = scores[filtered].topk(most)
        for i, values, ids in zip(filtered, best, order, strict=True):
            weights = keep(values.double().numpy(), totals[i], params[i], whole=most == vocab)
            if weights is None:
                values, ids = scores[i].sort(descending=True)
                weights = keep(values.double().numpy(), totals[i], params[i], whole=True)
            assert weights is not None
            found[i] = _by_id(ids.numpy()[: weights.size], weights)
    for i in set(range(len(params))) - set(filtered):
        found[i] = Candidates(np.arange(vocab), np.exp(scores[i].double().numpy() - totals[i]))
    return found


def keep(values: F64, log_total: float, params: SamplingParams, *, whole: bool) -> F64 | None:
    """Weights of the tokens that are kept, a beginning of `values`.

    Args:
        values: the best scores, best first.
        log_total: log of the sum of exp(score) over the vocabulary.
        params: top_k, top_p and min_p of it.
        whole: whether `values` are all scores there are.

    Returns:
        None when more tokens than `values` has might be kept.
    """
    if 0 < params.top_k <= values.size:
        values, whole = values[: params.top_k], True
        log_total = float(values[0] + np.log(np.exp(values - values[0]).sum()))
    weights: F64 = np.exp(values - log_total)
    kept = weights >= params.min_p * weights[0]
    if params.top_p < 1:
        kept &= np.cumsum(weights) - weights < params.top_p
    count = int(kept.sum())
    return weights[:count] if whole or count < values.size else None


def draw(among: Candidates, seed: int, index: int) -> int:
    """Draw one token with the index-th number of a seed's stream.

    Random numbers are addressed, not consumed: an output position that is computed again draws the same.
    """
    stream = np.random.Generator(np.random.Philox(key=seed & SEED_MASK, counter=index))
    sums = np.cumsum(among.weights)
    return int(among.ids[np.searchsorted(sums, sums[-1] * stream.random(), side="right")])


def _filters(params: SamplingParams, vocab: int) -> bool:
    """Whether anything is ruled out at all."""
    return 0 < params.top_k < vocab or params.top_p < 1 or params.min_p > 0


def _by_id(ids: I64, weights: F64) -> Candidates:
    order = np.argsort(ids)
    return Candidates(ids[order], weights[order])
