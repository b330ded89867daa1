"""The features of a chunk set, from its decodes and prefill chunks."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kaiseki.core.decision import F64
from kaiseki.core.protocols import (
    F_CHUNKS,
    F_CONTEXT,
    F_DECODES,
    F_PAIRS,
    F_PREFIX,
    F_SLOT,
    F_TOKENS,
    N_FEATURES,
)


def chunk_features(decode_contexts: ArrayLike = (), starts: ArrayLike = (), lengths: ArrayLike = ()) -> F64:
    """float64[N_FEATURES] of one iteration.

    Args:
        decode_contexts: [n], tokens each decode attends to.
        starts, lengths: [m], where each prefill chunk begins and how many tokens it has (above 0).

    Raises:
        ValueError: starts and lengths differ in number, a length is not positive, or anything is negative.
    """
    contexts, first, tokens = (np.asarray(a, np.float64) for a in (decode_contexts, starts, lengths))
    if first.shape != tokens.shape or (tokens <= 0).any() or (first < 0).any() or (contexts < 0).any():
        raise ValueError(f"chunks start at {first} with lengths {tokens}, decodes have contexts {contexts}")
    made = np.zeros(N_FEATURES)
    made[F_SLOT] = float(contexts.size + tokens.size > 0)
    made[F_DECODES], made[F_CONTEXT] = contexts.size, contexts.sum()
    made[F_CHUNKS], made[F_TOKENS] = tokens.size, tokens.sum()
    made[F_PAIRS] = (tokens * (first + (tokens + 1) / 2)).sum()
    made[F_PREFIX] = first.sum()
    return made
