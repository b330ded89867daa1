"""Faster linear layers for a model on the CPU: weights packed for oneDNN, layers that share an input fused.

Decode steps multiply few rows by large matrices. There oneDNN with weights in its own blocked order
beats the default BLAS, most of all on the language-model head, and one product is faster than three.
Results differ from the plain layers' only by the order of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that families of models apply to one and the same input."""
PACK_FOR_ROWS = 32
"""Rows that packing optimises for; it is a hint, any number works."""


class PackedLinear(nn.Module):
    """A linear layer whose weight is kept in oneDNN's blocked order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight`: [out, in]; `bias`: [out]."""
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_FOR_ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return torch.as_tensor(torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], ""))


class SharedProduct:
    """One product for several layers with the same input; each layer then takes its columns."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        """Concatenate the layers' weights."""
        biases = [p.detach() for layer in layers for name, p in layer.named_parameters() if name == "bias"]
        self.sizes = [layer.out_features for layer in layers]
        self.product = PackedLinear(
            torch.cat([layer.weight for layer in layers]),
            torch.cat(biases) if biases else None,
        )
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._left = 0

    def take(self, x: Tensor, index: int) -> Tensor:
        """Columns of layer `index`; the product is computed when the first layer asks."""
        if x is not self._input:
            self._input, self._left = x, len(self.sizes)
            self._parts = self.product(x).split(self.sizes, dim=-1)
        part = self._parts[index]
        self._left -= 1
        if self._left == 0:  # all have been here: nothing is kept alive until the next step
            self._input, self._parts = None, ()
        return part


class FusedLinear(nn.Module):
    """Stands in for one of several layers that share an input."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        """Layer `index` of `shared`."""
        super().__init__()
        self._shared = shared
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self._shared.take(x, self._index)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN can do products of this type on this machine."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear_layers(model: nn.Module) -> None:
    """Replace the linear layers inside a model, in place. Their old weights are let go of."""
    for parent in list(model.modules()):
        plain = {name: layer for name, layer in parent.named_children() if type(layer) is nn.Linear}
        for names in SHARED_INPUT:
            layers = [plain[name] for name in names if name in plain]
            if len(layers) == len(names) and _alike(layers):
                shared = SharedProduct(layers)
                for i, name in enumerate(names):
                    setattr(parent, name, FusedLinear(shared, i))
                    del plain[name]
        for name, layer in plain.items():
            setattr(parent, name, PackedLinear(layer.weight, layer.bias))


def _alike(layers: list[nn.Linear]) -> bool:
    """Whether the layers take inputs of one size and all have a bias, or none has."""
    return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
