"""Decoder layers of known families as a few compiled loops, in float32 on the CPU.

What transformers makes of a layer is some forty operations. In a step of a few tokens, starting them
takes as long as a small model's arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kaiseki.engines.embedded.attention import PagedStep, placing
from kaiseki.engines.embedded.attention.cpu import CpuAttention
from kaiseki.engines.embedded.compiled import F32, SERIAL_ROWS
from kaiseki.engines.embedded.linear import PackedLinear, joined
from kaiseki.engines.embedded.products import gated_product, pack
from kaiseki.engines.embedded.tiles import COLUMNS

FAMILIES = frozenset({"Llama", "Qwen2", "Qwen3", "SmolLM3"})
"""Families whose decoder layers compute what `FusedLayer` does. Others keep their own layers."""


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, norm: Any) -> None:
        """Take weight and eps from one of transformers' RMS norms."""
        self.weight: F32 = norm.weight.detach().numpy().copy()
        self.eps = np.float32(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, size], contiguous, to the same."""
        out = torch.empty_like(x)
        norm = placing.rms_norm if x.shape[0] <= SERIAL_ROWS else placing.rms_norm_parallel
        norm(x.numpy(), self.weight, self.eps, out.numpy())
        return out


class FusedLayer(nn.Module):
    """x + attention(norm(x)), then x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, layer: Any, backend: CpuAttention) -> None:
        """Take over the weights of a layer that `can_fuse`."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._backend = backend
        self._index = int(attention.layer_idx)
        self._scale = float(attention.scaling)
        self._rotates = bool(getattr(attention, "use_rope", True))
        self._head_norms, self._head_eps = _head_norms(attention)
        self._attention_norm = RmsNorm(layer.input_layernorm)
        self._project = PackedLinear(*joined([attention.q_proj, attention.k_proj, attention.v_proj]))
        self._output = PackedLinear(*joined([attention.o_proj]))
        self._mlp_norm = RmsNorm(layer.post_attention_layernorm)
        sides = [pack(side.weight.detach().numpy()) for side in (mlp.gate_proj, mlp.up_proj)]
        self._gate_up = np.stack(sides, 1)
        self._down = PackedLinear(*joined([mlp.down_proj]))

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], paged: PagedStep, **_: Any
    ) -> Tensor:
        """[1, T, hidden], changed in place; cosines and sines: [1, T, head_dim]. The rest has no effect."""
        x = hidden_states[0]
        head_dim = self._backend.shape.head_dim
        used = head_dim if self._rotates else 0
        cos, sin = (part[0, :, :used].numpy() for part in position_embeddings)
        projected = self._project(self._attention_norm(x))
        attended = self._backend.attend_projected(
            paged.plan,
            self._index,
            projected.view(x.shape[0], -1, head_dim),
            (cos, sin),
            self._head_norms,
            self._head_eps,
            self._scale,
        )
        self._output.add_to(x, attended.view(x.shape[0], -1))
        gated = torch.empty(x.shape[0], self._gate_up.shape[0] * COLUMNS)
        gated_product(self._mlp_norm(x).numpy(), self._gate_up, gated.numpy(), torch.get_num_threads())
        self._down.add_to(x, gated)
        return hidden_states


def fuse_layers(model: nn.Module, backend: CpuAttention) -> None:
    """Replace decoder layers inside a float32 model on the CPU, in place. Others stay as they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if can_fuse(child):
                setattr(parent, name, FusedLayer(child, backend))


def can_fuse(layer: Any) -> bool:
    """Whether `FusedLayer` computes the same as this module."""
    if type(layer).__name__.removesuffix("DecoderLayer") not in FAMILIES:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    plain = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(part) is nn.Linear for part in (*projections, *plain))
        and len({part.bias is None for part in projections}) == 1
        and all(part.bias is None for part in plain)
        and all(part.out_features % COLUMNS == 0 for part in (*projections, *plain))
        and "silu" in type(mlp.act_fn).__name__.lower()
        and getattr(attention, "sliding_window", None) is None
    )


def _head_norms(attention: Any) -> tuple[F32, float]:
    """The norms of queries and keys, as `placing.place` wants them, and their eps."""
    if not hasattr(attention, "q_norm"):
        return np.empty((0, attention.head_dim), np.float32), 0.0
    norms = [attention.q_norm, attention.k_norm]
    return np.stack([norm.weight.detach().numpy() for norm in norms]), float(norms[0].variance_epsilon)
