"""Transformers calls us here, once per attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from kaiseki.engines.embedded.attention.base import AttentionBackend

IMPLEMENTATION = "kaiseki"
"""The name to give transformers as `attn_implementation`."""

IGNORED = frozenset(
    {"dropout", "position_ids", "use_cache", "output_attentions", "is_causal", "cache_position"}
)
"""Arguments of attention functions that change nothing here, whatever their value (`is_causal` is
checked apart)."""


class UnsupportedModel(ValueError):
    """The model needs something that paged attention here does not do."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Passed through the model's forward as the keyword `paged`, down to each attention layer.

    Attributes:
        backend: what attends.
        plan: the backend's plan for this forward.
    """

    backend: AttentionBackend
    plan: Any


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: PagedStep | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in transformers' convention: query [1, heads, T, head_dim] and so on.

    Raises:
        UnsupportedModel: the layer asks for anything but plain causal attention.
    """
    if paged is None:
        raise UnsupportedModel("the model does not pass keyword arguments on to its attention layers")
    _check_options(module, attention_mask, options)
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = paged.backend.attend(
        paged.plan,
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return out.unsqueeze(0), None


def _check_options(module: torch.nn.Module, mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    """Raise UnsupportedModel for options that would change the result."""
    asked = [name for name, value in options.items() if value is not None and name not in IGNORED]
    if mask is not None:
        asked.append("attention_mask")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        asked.append("non-causal attention")
    if asked:
        kind = type(module).__name__
        raise UnsupportedModel(f"{kind} asks for {', '.join(asked)}, which paged attention does not support")


def register() -> None:
    """Make `attn_implementation="kaiseki"` known to transformers; calling it again changes nothing.

    No mask function is registered under the name, so transformers makes no attention masks.
    """
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
