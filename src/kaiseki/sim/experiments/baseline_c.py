"""Baseline C: speculative decoding, verified beside the target or apart from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kaiseki.core.protocols import F_CONTEXT, F_DECODES, F_SLOT, N_FEATURES
from kaiseki.cost.cards import load_card
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.roofline import Roofline
from kaiseki.sim.experiments.rows import Experiment, Row

BESIDE, APART = 0.71, 0.43
"""Acceptance of a draft token, by placement: given, not found."""
REPORTED_BESIDE, REPORTED_APART = 1.45, 0.78
DRAFTS = 4
CONTEXT = 1_000
BATCHES = (1, 8, 32, 128)
LINK_GB_S, LINK_US = 50.0, 10.0
"""Between nodes."""
FEATURES_PER_TOKEN = 3
"""Layers whose outputs EAGLE-3's draft head reads of every token."""


def tokens_per_step(acceptance: float, drafts: int) -> float:
    """Expected tokens of a verified chain: 1 + a + ... + a^k (Leviathan et al., ICML 2023)."""
    return sum(acceptance**i for i in range(drafts + 1))


def speed_up(acceptance: float, batch: int, apart: bool) -> float:
    """Tokens per time over plain decoding; drafts come one by one, and are sent if they are apart."""
    model, card = load_model("llama-2-70b"), load_card("a100-80")
    plain = Deployment(model, card, tp=8)
    head = Deployment(model.model_copy(update={"layers": 1}), card, tp=8)
    features = np.zeros(N_FEATURES)
    features[F_SLOT], features[F_DECODES], features[F_CONTEXT] = 1.0, batch, batch * CONTEXT
    step = Roofline(plain).iteration_ns(features)
    verify = Roofline(replace(plain, draft_tokens=DRAFTS)).iteration_ns(features)
    draft = DRAFTS * Roofline(head).iteration_ns(features)
    sent_bytes = batch * (DRAFTS + 1) * (FEATURES_PER_TOKEN * model.hidden * 2 + model.kv_bytes_per_token)
    send = 2 * LINK_US * 1e3 + sent_bytes / LINK_GB_S if apart else 0.0
    return tokens_per_step(acceptance, DRAFTS) * step / (verify + draft + send)


def batch_with(wanted: float, acceptance: float) -> int:
    """The largest batch that is sped up so much where drafts are verified beside their target."""
    low, high = 1, 1_024
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if speed_up(acceptance, middle, False) >= wanted else (low, middle - 1)
    return low


def rows(requests: int) -> Iterator[Row]:
    """Closed form: nothing is random in it."""
    alike = batch_with(REPORTED_BESIDE, BESIDE)
    for batch in sorted({*BATCHES, alike}):
        beside, apart = speed_up(BESIDE, batch, False), speed_up(APART, batch, True)
        yield Row(f"speed-up beside, batch {batch}", beside, REPORTED_BESIDE if batch == alike else None)
        yield Row(f"speed-up apart, batch {batch}", apart, REPORTED_APART if batch == alike else None)
    yield Row("tokens per step beside", tokens_per_step(BESIDE, DRAFTS))
    yield Row("tokens per step apart", tokens_per_step(APART, DRAFTS))


EXPERIMENT = Experiment(
    title="Speculative decoding: what does it bring, and what when drafts are verified on another node?",
    setting=(
        f"Llama-2-70B on 8 A100 (TP 8), chains of {DRAFTS} draft tokens from a head of one layer, "
        f"contexts of {CONTEXT:,} tokens. Acceptance is given: {BESIDE} beside, {APART} apart. Apart, "
        f"features and KV of every draft token go over a link of {LINK_GB_S:g} GB/s. From the cost model, "
        "without queueing."
    ),
    differs=(
        "The report names no batch. Verifying costs little while a step waits for weights and much when "
        "it computes, so the speed-up falls as the batch grows. The reported pair is set beside the batch "
        "at which ours beside is the same, and there ours apart is near it too: what is lost is mostly "
        "acceptance, not the link. Where verification is placed decides between a gain and a loss."
    ),
    rows=rows,
    requests=1,
)
