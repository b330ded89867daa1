"""Descriptions of cards and models: complete, sourced, and in agreement with what is published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kaiseki.cost.cards import card_names, load_card
from kaiseki.cost.catalogue import UnknownName, described
from kaiseki.cost.hf_config import from_config, load_model
from kaiseki.cost.model_shape import ModelShape, model_names

CARDS = {"a100-40", "a100-80", "h100", "h200", "b200", "mi300x", "trainium2", "l4", "l40s", "cpu"}
MODELS = {
    "llama-2-70b": 68.98e9,
    "llama-3-8b": 8.03e9,
    "llama-3-70b": 70.55e9,
    "llama-3-405b": 405.9e9,
    "qwen3-8b": 8.19e9,
    "qwen3-30b-a3b": 30.5e9,
    "deepseek-v3": 671e9,
    "smollm2-135m": 134.5e6,
}
"""Parameters as their model cards state them."""

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def figures(node: object, path: str = "") -> list[str]:
    if isinstance(node, dict):
        return [p for k, v in node.items() for p in figures(v, f"{path}.{k}" if path else k)]
    return [path]


def test_the_names_of_the_contract_are_there() -> None:
    assert set(card_names()) == CARDS and set(model_names()) == set(MODELS)


@pytest.mark.parametrize(
    "kind,name", [*(("cards", c) for c in sorted(CARDS)), *(("models", m) for m in sorted(MODELS))]
)
def test_every_figure_has_a_source(kind: str, name: str) -> None:
    description = dict(described(kind, name))
    sources = description.pop("sources")
    assert set(figures(description)) - {"id", "name"} == set(sources)
    assert all(len(text) > 10 for text in sources.values())


@pytest.mark.parametrize("name", sorted(CARDS))
def test_cards_are_plausible(name: str) -> None:
    card = load_card(name)
    assert card.idle_watts < card.peak_watts
    assert card.tflops["fp32"] < card.tflops["bf16"] <= card.flops("fp8") / 1e12
    assert card.flops("int4") == card.flops("bf16")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_parameters_agree_with_the_model_card(name: str) -> None:
    assert load_model(name).parameters == pytest.approx(MODELS[name], rel=0.002)


@pytest.mark.parametrize(
    "name,kib", [("llama-2-70b", 320), ("llama-3-8b", 128), ("llama-3-405b", 504), ("deepseek-v3", 68.6)]
)
def test_kv_bytes_per_token(name: str, kib: float) -> None:
    assert load_model(name).kv_bytes_per_token / 1024 == pytest.approx(kib, rel=0.001)


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(UnknownName, match="a100-40, a100-80, b200"):
        load_card("a100")
    with pytest.raises(UnknownName, match="deepseek-v3, llama-2-70b"):
        load_model("llama-4")
    with pytest.raises(UnknownName):
        load_model("no/such/config.json")


def test_a_hugging_face_config_gives_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    read, known = load_model(path), load_model("llama-3-8b")
    ignored = {"id", "name", "sources"}
    assert read.model_dump(exclude=ignored) == known.model_dump(exclude=ignored)


def test_a_hugging_face_config_with_experts_and_latent_attention() -> None:
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
        "num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280,
        "max_position_embeddings": 163840, "tie_word_embeddings": False, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    ignored = {"id", "name", "sources"}
    known = load_model("deepseek-v3").model_dump(exclude=ignored)
    assert from_config(config, "test").model_dump(exclude=ignored) == known


@pytest.mark.parametrize(
    "change,message",
    [
        ({"hidden_size": None}, "hidden_size|not the configuration"),
        ({"num_attention_heads": 0}, "not the configuration"),
        ({"vocab_size": -1}, "vocabulary"),
        ({"num_key_value_heads": 5}, "kv_heads"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"quantization_config": {"quant_method": "magic"}}, "magic"),
    ],
)
def test_a_wrong_config_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config({**LLAMA, **change}, "test")
    with pytest.raises(ValueError, match="lacks vocab_size"):
        from_config({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "test")


@pytest.mark.parametrize("text,message", [("{", "not JSON"), ("[1]", "no object")])
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_model(path)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    sizes = load_model("qwen3-30b-a3b").model_dump()
    with pytest.raises(ValueError, match=r"moe\.active"):
        ModelShape.model_validate({**sizes, "moe": {**sizes["moe"], "active": 129}})
    with pytest.raises(ValueError, match=r"moe\.dense_layers"):
        ModelShape.model_validate({**sizes, "moe": {**sizes["moe"], "dense_layers": 49}})
