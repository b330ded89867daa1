"""Refusing models that paged attention would run wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kaiseki.core.decision import I32
from kaiseki.engines.embedded.attention import AttentionBackend
from kaiseki.engines.embedded.attention.interface import UnsupportedModel
from kaiseki.engines.embedded.batch import lay_out
from kaiseki.engines.embedded.forward import ModelRunner

VARYING_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies depend on the longest sequence of the batch."""
PROBE_TOKENS = 6
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest accepted difference from the model's own logits, relative to the largest of them."""


def check_config(config: Any) -> None:
    """Refuse models whose attention is known to be something else than plain, causal and full.

    Raises:
        UnsupportedModel: with what stands in the way.
    """
    kind = getattr(config, "model_type", "model")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is an encoder-decoder model; only decoder-only models are supported")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other:
        raise UnsupportedModel(f"{kind} has {', '.join(other)} layers; only full attention is supported")
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for varying in VARYING_ROPE.intersection(r.get("rope_type") for r in (rope, *per_layer_type)):
        raise UnsupportedModel(
            f"{kind} uses {varying} rotary embeddings, which make a sequence's output depend on "
            "the sequences beside it"
        )
    if getattr(config, "alibi", False):
        raise UnsupportedModel(f"{kind} uses ALiBi biases, which paged attention does not support")


def take_over(model: Any, backend: AttentionBackend, block_tokens: int) -> ModelRunner:
    """Make a model run on paged attention, and compare its logits before and after.

    Two short sequences run together, one of them in two chunks, in blocks 0 and 1. What a configuration
    does not tell (state outside attention layers, other uses of positions) shows here.

    Raises:
        UnsupportedModel: the logits differ.
    """
    n = min(PROBE_TOKENS, block_tokens)
    vocab = int(model.config.vocab_size)
    first = (np.arange(n, dtype=np.int32) * 7 + 3) % vocab
    second = (np.arange(n - 1, dtype=np.int32) * 5 + 11) % vocab
    expected = torch.stack([_own_logits(model, ids) for ids in (first, second)])
    runner = ModelRunner(model, backend, block_tokens)
    tables = np.array([[0], [1]], np.int32)
    runner.logits(lay_out([first[:2]], np.zeros(1, np.int32), tables[:1], [False], block_tokens))
    both = lay_out([first[2:], second], np.array([2, 0], np.int32), tables, [True, True], block_tokens)
    worst = float((runner.logits(both) - expected).abs().max())
    if not worst <= TOLERANCE[backend.shape.dtype] * max(1.0, float(expected.abs().max())):
        raise UnsupportedModel(f"logits differ by {worst:.3g} from the model's own attention")
    return runner


def _own_logits(model: Any, ids: I32) -> torch.Tensor:
    """float32[vocabulary], on the CPU: the last token's logits as transformers computes them."""
    model.eval().set_attn_implementation("sdpa")
    with torch.inference_mode():
        whole = torch.from_numpy(ids.astype(np.int64)).to(next(model.parameters()).device).unsqueeze(0)
        return torch.as_tensor(model(input_ids=whole, use_cache=False).logits)[0, -1].float().cpu()
