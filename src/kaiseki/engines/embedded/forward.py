"""One forward of a Hugging Face causal LM over chunks of many sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kaiseki.core.decision import I32
from kaiseki.engines.embedded.attention import (
    IMPLEMENTATION,
    AttentionBackend,
    PagedStep,
    PoolShape,
    register,
)
from kaiseki.engines.embedded.attention.interface import UnsupportedModel
from kaiseki.engines.embedded.batch import Batch, lay_out
from kaiseki.engines.embedded.linear import can_pack, pack_linear_layers

VARYING_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies depend on the longest sequence of the batch."""
PROBE_TOKENS = 6


class ModelRunner:
    """A model with its attention replaced by a paged backend."""

    def __init__(self, model: Any, backend: AttentionBackend, block_tokens: int) -> None:
        """Take over `model`, a `PreTrainedModel` with a language-model head; pages of `block_tokens`.

        Raises:
            UnsupportedModel: the model can't be run exactly this way.
        """
        check_config(model.config)
        register()
        self.model = model.eval()
        self.backend = backend
        self.block_tokens = block_tokens
        self.model.set_attn_implementation(IMPLEMENTATION)
        self.model.requires_grad_(False)
        self.device = next(model.parameters()).device
        if self.device.type == "cpu" and can_pack(backend.shape.dtype):
            pack_linear_layers(self.model)

    def logits(self, batch: Batch) -> torch.Tensor:
        """float32[len(batch.sampled), vocabulary], on the CPU; puts all tokens' K and V into the pool."""
        step = PagedStep(self.backend, self.backend.plan(batch))
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.from_numpy(batch.ids.astype(np.int64)).to(self.device).unsqueeze(0),
                position_ids=torch.from_numpy(batch.positions).to(self.device).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.from_numpy(batch.sampled).to(self.device),
                paged=step,
            )
            return torch.as_tensor(out.logits)[0].float().cpu()


def pool_shape(config: Any, blocks: int, block_tokens: int, dtype: torch.dtype) -> PoolShape:
    """Shape of the pool that a model with this configuration needs."""
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return PoolShape(
        int(config.num_hidden_layers), blocks, block_tokens, heads, int(kv_heads), int(head_dim), dtype
    )


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


def verify(runner: ModelRunner, tolerance: float) -> None:
    """Compare chunked, packed, paged logits with those of the model's own attention, once, at load.

    Two short sequences run together, one in two chunks, in blocks 0 and 1. What a configuration does
    not tell (state outside attention layers, other uses of positions) shows here.

    Raises:
        UnsupportedModel: the logits differ, or some layers did not come to us for attention.
    """
    block_tokens = runner.block_tokens
    vocab = int(runner.model.config.vocab_size)
    n = min(PROBE_TOKENS, block_tokens)
    first = (np.arange(n, dtype=np.int32) * 7 + 3) % vocab
    second = (np.arange(n - 1, dtype=np.int32) * 5 + 11) % vocab
    tables = np.array([[0], [1]], np.int32)
    runner.logits(lay_out([first[:2]], np.zeros(1, np.int32), tables[:1], [False], block_tokens))
    batch = lay_out([first[2:], second], np.array([2, 0], np.int32), tables, [True, True], block_tokens)
    ours = runner.logits(batch)
    expected = torch.stack([_own_logits(runner, ids) for ids in (first, second)])
    worst = float((ours - expected).abs().max())
    if not worst <= tolerance * max(1.0, float(expected.abs().max())):
        raise UnsupportedModel(f"logits differ by {worst:.3g} from the model's own attention")


def warm_up(runner: ModelRunner, tokens: int) -> None:
    """Run a fresh prefill, a continued one and decodes, twice: compiles kernels and touches memory.

    Overwrites the first blocks of the pool.
    """
    size = runner.block_tokens
    tokens = min(tokens, (runner.backend.shape.blocks - 1) * size)
    half = tokens // 2
    tables = np.arange(-(-tokens // size), dtype=np.int32)[None, :]
    ids = np.ones(tokens, np.int32)
    for _ in range(2):
        for start, end in ((0, half), (half, tokens - 1), (tokens - 1, tokens)):
            runner.logits(lay_out([ids[start:end]], np.array([start], np.int32), tables, [True], size))


def _own_logits(runner: ModelRunner, ids: I32) -> torch.Tensor:
    """float32[vocabulary], the last token's logits by transformers' own attention."""
    runner.model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            whole = torch.from_numpy(ids.astype(np.int64)).to(runner.device).unsqueeze(0)
            return torch.as_tensor(runner.model(input_ids=whole, use_cache=False).logits)[0, -1].float().cpu()
    finally:
        runner.model.set_attn_implementation(IMPLEMENTATION)
