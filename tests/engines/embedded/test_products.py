"""Compiled products and layers against the same in NumPy and Torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kaiseki.engines.embedded.attention import PoolShape
from kaiseki.engines.embedded.attention.cpu import CpuAttention
from kaiseki.engines.embedded.layers import FusedLayer, RmsNorm, fuse_layers
from kaiseki.engines.embedded.linear import PackedLinear, pack_linear_layers
from kaiseki.engines.embedded.products import DEPTH, ROW_TILES, gated_product, pack
from kaiseki.engines.embedded.tiles import ROWS

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "size"),
    [(1, 7, 5), (2, 16, 16), (13, DEPTH + 60, 33), (ROWS * ROW_TILES + 5, 2 * DEPTH + 1, 48)],
)
def test_a_packed_layer_multiplies(rows: int, depth: int, size: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(depth, size, bias=bias), torch.randn(1, rows, depth)
    packed = PackedLinear(plain.weight, plain.bias)
    with torch.inference_mode():
        assert torch.allclose(packed(x), plain(x), atol=1e-5)


def test_a_packed_layer_adds_in_place() -> None:
    x, weight, before = (torch.randn(*size) for size in ((9, 20), (32, 20), (9, 32)))
    out = before.clone()
    PackedLinear(weight, None).add_to(out, x)
    assert torch.allclose(out, before + x @ weight.T, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 110])
def test_gated_products(rows: int) -> None:
    x, gate, up = (RNG.standard_normal(size).astype(np.float32) for size in ((rows, 70), (48, 70), (48, 70)))
    x[0] *= 10  # far out on both sides of silu
    out = np.empty((rows, 48), np.float32)
    gated_product(x, np.stack([pack(gate), pack(up)], 1), out, 2)
    left, right = x.astype(np.float64) @ gate.T, x.astype(np.float64) @ up.T
    expected = left / (1 + np.exp(-left)) * right
    assert np.allclose(out, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 100])
def test_rms_norms(model: Callable[..., Any], rows: int) -> None:
    norm, x = model("llama").model.norm, torch.randn(rows, 64)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64))
        assert torch.allclose(RmsNorm(norm)(x), norm(x), atol=1e-5)


def fused(model: Any) -> list[bool]:
    backend = CpuAttention(PoolShape(2, 4, 4, 4, 2, 16, torch.float32), 1)
    fuse_layers(model, backend)
    pack_linear_layers(model)
    return [isinstance(layer, FusedLayer) for layer in model.model.layers]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
def test_layers_of_known_families_are_fused(model: Callable[..., Any], family: str) -> None:
    assert fused(model(family)) == [True, True]


def _with_bias(layer: Any) -> None:
    layer.mlp.down_proj = nn.Linear(96, 64)


def _with_other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def _with_odd_size(layer: Any) -> None:
    layer.mlp.gate_proj, layer.mlp.up_proj = nn.Linear(64, 90, bias=False), nn.Linear(64, 90, bias=False)


@pytest.mark.parametrize("change", [_with_bias, _with_other_activation, _with_odd_size])
def test_other_layers_are_left_alone(model: Callable[..., Any], change: Callable[[Any], None]) -> None:
    made = model("llama")
    change(made.model.layers[1])
    assert fused(made) == [True, False]
