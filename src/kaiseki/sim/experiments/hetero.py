"""Chunks and budgets by card: what suits one does not suit another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kaiseki.core.costs import add_decode, fit_prefill
from kaiseki.core.protocols import F_CHUNKS, F_PAIRS, F_SLOT, F_TOKENS, N_FEATURES
from kaiseki.cost.capacity import kv_blocks
from kaiseki.cost.cards import load_card
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.roofline import Roofline
from kaiseki.sim.experiments.rows import Experiment, Row

CARDS = ("a100-80", "h100", "h200", "b200", "mi300x", "trainium2", "cpu")
MODEL = "llama-3-8b"
TBT_MS = 60.0
DECODES, CONTEXT = 32, 1_000
ENOUGH = 0.9
"""Of the best tokens per time: from there on a larger chunk gains little."""
LARGEST = 8_192
BLOCK = 16


def best_chunk(roofline: Roofline) -> int:
    """Smallest power of two of tokens that computes at `ENOUGH` of the best rate, beside nothing else."""
    sizes = 2 ** np.arange(14)
    features = np.zeros((sizes.size, N_FEATURES))
    features[:, F_SLOT] = features[:, F_CHUNKS] = 1.0
    features[:, F_TOKENS], features[:, F_PAIRS] = sizes, sizes * (sizes + 1) / 2
    rate = sizes / roofline.iterations_ns(features)
    return int(sizes[np.argmax(rate >= ENOUGH * rate.max())])


def budget(roofline: Roofline) -> int:
    """Prompt tokens that fit beside the decodes within the TBT."""
    features, trial = np.zeros(N_FEATURES), np.zeros(N_FEATURES)
    for _ in range(DECODES):
        add_decode(features, float(CONTEXT))
    return int(fit_prefill(roofline.planes(), features, trial, 0.0, LARGEST, TBT_MS * 1e6))


def rows(requests: int) -> Iterator[Row]:
    """From the cost model; nothing is random in it."""
    model = load_model(MODEL)
    for name in CARDS:
        deployment = Deployment(model, load_card(name))
        roofline = Roofline(deployment)
        yield Row(f"{name}: chunk that computes at 90 % of the best rate, tokens", best_chunk(roofline))
        yield Row(f"{name}: prompt tokens beside {DECODES} decodes within {TBT_MS:g} ms", budget(roofline))
        yield Row(f"{name}: KV, tokens", kv_blocks(deployment, BLOCK, LARGEST, DECODES) * BLOCK)


EXPERIMENT = Experiment(
    title="Which chunk and budget for which card?",
    setting=(
        f"{MODEL} on one card each; {DECODES} decodes with contexts of {CONTEXT:,} tokens; from the cost "
        "model."
    ),
    differs=(
        "Nothing is reported. One static budget for all of these would be late on the slowest and leave "
        "the fastest idle; with the tightest TBT as the bound the budget follows from the card by "
        "itself, and mixed fleets need no setting."
    ),
    rows=rows,
    requests=1,
)
