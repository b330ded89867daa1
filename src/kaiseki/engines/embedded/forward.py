"""One forward of a Hugging Face causal LM over chunks of many sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kaiseki.engines.embedded.attention import (
    IMPLEMENTATION,
    AttentionBackend,
    PagedStep,
    PoolShape,
    register,
)
from kaiseki.engines.embedded.attention.cpu import CpuAttention
from kaiseki.engines.embedded.batch import Batch, lay_out
from kaiseki.engines.embedded.layers import fuse_layers
from kaiseki.engines.embedded.linear import can_pack, pack_linear_layers


class ModelRunner:
    """A model with its attention replaced by a paged backend."""

    def __init__(self, model: Any, backend: AttentionBackend, block_tokens: int) -> None:
        """Take over `model`, a `PreTrainedModel` with a language-model head; pages of `block_tokens`."""
        register()
        self.model = model.eval()
        self.backend = backend
        self.block_tokens = block_tokens
        self.model.set_attn_implementation(IMPLEMENTATION)
        self.model.requires_grad_(False)
        self.device = next(model.parameters()).device
        if self.device.type == "cpu" and can_pack(backend.shape.dtype):
            if backend.shape.dtype == torch.float32 and isinstance(backend, CpuAttention):
                fuse_layers(self.model, backend)
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


def pool_shape(
    config: Any, blocks: int, block_tokens: int, dtype: torch.dtype, host_blocks: int = 0
) -> PoolShape:
    """Shape of the pool that a model with this configuration needs."""
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return PoolShape(
        int(config.num_hidden_layers), blocks, block_tokens, heads, int(kv_heads), int(head_dim), dtype,
        host_blocks,
    )  # fmt: skip


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
