"""Model shapes from the `config.json` of Hugging Face repositories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kaiseki.cost.cards import Precision
from kaiseki.cost.model_shape import Experts, Latent, ModelShape, named_model

_PRECISIONS: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
_QUANTISED: dict[str, Precision] = {"fp8": "fp8", "compressed-tensors": "fp8", "gptq": "int4", "awq": "int4"}


def load_model(name: str | Path) -> ModelShape:
    """A model by its name, or by the path of a `config.json`.

    Raises:
        UnknownName: neither a known model nor an existing file; the message lists the known ones.
        ValueError: the file lacks a size, or describes something other than a decoder.
    """
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return named_model(str(name))
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds no object")
    return from_config(config, source=str(path))


def from_config(config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    Args:
        config: the parsed `config.json`; of a multimodal model its text part is used.
        source: where it came from, for messages.

    Raises:
        ValueError: a size is missing or wrong; the message names it.
    """
    text = config.get("text_config", config)
    try:
        heads, hidden = text["num_attention_heads"], text["hidden_size"]
        return ModelShape(
            id=source,
            name=str(text.get("model_type", source)),
            layers=text["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or hidden // heads,
            ffn=text["intermediate_size"],
            vocabulary=text["vocab_size"],
            context_tokens=text.get("max_position_embeddings", 4096),
            tied_embeddings=text.get("tie_word_embeddings", config.get("tie_word_embeddings", True)),
            weights=_weights(config, text, source),
            kv="fp32" if _declared(config, text) == "float32" else "bf16",
            moe=_experts(text),
            mla=_latent(text),
            sources={"": source},
        )
    except KeyError as error:
        raise ValueError(f"{source}: lacks {error.args[0]}") from error
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{source}: not the configuration of a decoder: {error}") from error


def _declared(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Precision the configuration declares, in its own words; newer ones say `dtype`."""
    for part in (text, config):
        for key in ("dtype", "torch_dtype"):
            if part.get(key):
                return str(part[key])
    return "bfloat16"


def _weights(config: Mapping[str, Any], text: Mapping[str, Any], source: str) -> Precision:
    """Precision of the weights: of the quantisation if there is one."""
    quantisation = config.get("quantization_config") or text.get("quantization_config")
    if not quantisation:
        declared = _declared(config, text)
        if declared not in _PRECISIONS:
            raise ValueError(f"{source}: dtype {declared!r} is none of {', '.join(_PRECISIONS)}")
        return _PRECISIONS[declared]
    method = str(quantisation.get("quant_method"))
    if method not in _QUANTISED:
        raise ValueError(f"{source}: quant_method {method!r} is none of {', '.join(_QUANTISED)}")
    return "int8" if quantisation.get("bits") == 8 else _QUANTISED[method]


def _experts(text: Mapping[str, Any]) -> Experts | None:
    """The mixture of experts, under the names Mixtral, Qwen and DeepSeek use."""
    found = (text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((n for n in found if n), 0)
    if experts <= 1:
        return None
    return Experts(
        experts=experts,
        active=text["num_experts_per_tok"],
        shared=text.get("n_shared_experts") or 0,
        ffn=text.get("moe_intermediate_size") or text["intermediate_size"],
        dense_layers=text.get("first_k_dense_replace") or 0,
    )


def _latent(text: Mapping[str, Any]) -> Latent | None:
    if not text.get("kv_lora_rank"):
        return None
    return Latent(
        query_rank=text.get("q_lora_rank"),
        kv_rank=text["kv_lora_rank"],
        rope_dim=text["qk_rope_head_dim"],
        nope_dim=text["qk_nope_head_dim"],
        value_dim=text["v_head_dim"],
    )
