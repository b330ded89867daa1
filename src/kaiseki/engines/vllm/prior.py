"""Where the online cost model starts from inside vLLM: the roofline of the model on the card it runs on."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from kaiseki.core.costs import add_decode, add_prefill
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
from kaiseki.cost.cards import load_card
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.hf_config import from_config
from kaiseki.cost.roofline import Roofline

_log = logging.getLogger(__name__)

CARDS = {
    "A100-SXM4-40GB": "a100-40",
    "A100": "a100-80",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
    "MI300X": "mi300x",
    "L40S": "l40s",
    "L4": "l4",
}
"""Card ids by a part of the device's name; the first that matches counts."""
_STEPS = {F_DECODES: 1.0, F_CHUNKS: 1.0, F_TOKENS: 64.0, F_CONTEXT: 4e3, F_PAIRS: 6e4, F_PREFIX: 4e3}
"""By how much a feature grows to see how the step's time does."""
UNKNOWN_NS = np.array([1e6, 1e5, 1e5, 1e5, 1e2, 1e1, 1e1])
"""For models that no roofline is known of: only a beginning, corrected by every step."""


def step_prior(model_config: Any, tensor_parallel: int, device_name: str) -> F64:
    """float64[N_FEATURES], ns per unit of feature.

    Args:
        model_config: vLLM's, with the Hugging Face configuration.
        tensor_parallel: cards that share each layer.
        device_name: as the driver tells it; empty on a CPU.
    """
    card = next((card for part, card in CARDS.items() if part in device_name), "cpu")
    try:
        shape = from_config(model_config.hf_text_config.to_dict(), source=str(model_config.model))
        roofline = Roofline(Deployment(shape, load_card(card), tp=tensor_parallel))
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("step times start from a guess, as there is no roofline of this model: %s", error)
        return UNKNOWN_NS.copy()
    return _slopes(roofline)


def _slopes(roofline: Roofline) -> F64:
    """How a step of a few decodes and a chunk grows with each feature, and what is fixed."""
    base = np.zeros(N_FEATURES)
    for _ in range(8):
        add_decode(base, 512.0)
    add_prefill(base, 512.0, 256.0)
    whole = roofline.iteration_ns(base)
    weights = np.zeros(N_FEATURES)
    for feature, step in _STEPS.items():
        more = base.copy()
        more[feature] += step
        weights[feature] = max(roofline.iteration_ns(more) - whole, 0.0) / step
    lone = np.zeros(N_FEATURES)
    add_decode(lone, 512.0)
    weights[F_SLOT] = max(roofline.iteration_ns(lone) - float(weights @ lone), 0.05 * whole)
    return np.maximum(weights, 1e-3)
