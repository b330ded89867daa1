"""Faster linear layers for a model on the CPU: weights packed, layers that share an input fused.

Steps multiply few rows by large matrices, and one product is faster than three. float32 is multiplied by
our own loops, bfloat16 by oneDNN with weights in its own blocked order. Results differ from the plain
layers' only by the order of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kaiseki.engines.embedded.products import pack, product
from kaiseki.engines.embedded.tiles import COLUMNS

SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that families of models apply to one and the same input."""
PACK_FOR_ROWS = 32
"""Rows that oneDNN's packing optimises for; it is a hint, any number works."""


class PackedLinear(nn.Module):
    """A float32 linear layer, or several side by side, with its weight packed for `products.product`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight`: [out, in]; `bias`: [out]."""
        super().__init__()
        self.size = weight.shape[0]
        self.weight = pack(weight.detach().numpy())
        self.start = torch.zeros(1, self.weight.shape[0] * COLUMNS)
        if bias is not None:
            self.start[0, : self.size] = bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty(rows.shape[0], self.start.shape[1])
        product(rows.numpy(), self.weight, self.start.numpy(), out.numpy(), torch.get_num_threads())
        return out[:, : self.size].view(*x.shape[:-1], self.size)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the product to `out`, float32[n, out], contiguous, `out` a multiple of COLUMNS; no bias."""
        total = out.numpy()
        product(x.numpy(), self.weight, total, total, torch.get_num_threads())


class OneDnnLinear(nn.Module):
    """A linear layer whose weight is kept in oneDNN's blocked order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight`: [out, in]; `bias`: [out]."""
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_FOR_ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return torch.as_tensor(torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], ""))


def joined(layers: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one layer that does what several do, side by side; all have a bias, or none."""
    biases = [p.detach() for layer in layers for name, p in layer.named_parameters() if name == "bias"]
    weights = [layer.weight.detach() for layer in layers]
    return torch.cat(weights), torch.cat(biases) if biases else None


def packed(layers: list[nn.Linear]) -> nn.Module:
    """A faster layer that does what several do, side by side."""
    weight, bias = joined(layers)
    return (PackedLinear if weight.dtype == torch.float32 else OneDnnLinear)(weight, bias)


class SharedProduct:
    """One product for several layers with the same input; each layer then takes its columns."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        """Concatenate the layers' weights."""
        self.sizes = [layer.out_features for layer in layers]
        self.product = packed(layers)
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
    """Whether there are faster products of this type on this machine."""
    if dtype == torch.float32:
        return True
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


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
            setattr(parent, name, packed([layer]))


def _alike(layers: list[nn.Linear]) -> bool:
    """Whether the layers take inputs of one size and all have a bias, or none has."""
    return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
