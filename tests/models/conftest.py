"""Tiny random models, and GGUF files of them written the way llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "h e", "1 2"]
TOKENS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]

HEADS, KV_HEADS, LAYERS, CONTEXT = 4, 2, 2, 256
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_hf(family: str, **config: Any) -> Any:
    """A random model whose every parameter, norms and biases too, differs from its default."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": False,
    } | config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def llama_cpp_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    rows = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return rows.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    model: Any,
    path: Path,
    pre: str = "gpt-2",
    quantised: gguf.GGMLQuantizationType | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write `model` as GGUF; `change` may add settings or tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name, weights = llama_cpp_name(hf_name), tensor.numpy()
        part = name.split(".")[-2]
        if config.model_type == "llama" and part in heads:
            weights = permuted(weights, heads[part])
        if quantised is not None and weights.ndim == 2:
            writer.add_tensor(name, gguf.quantize(weights, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, np.ascontiguousarray(weights))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache, and a model hub cache that is empty too and stays off the network."""
    from huggingface_hub import constants

    monkeypatch.setenv("KAISEKI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"
