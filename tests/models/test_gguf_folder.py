"""A GGUF file and the folder made from it are the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kaiseki.models import ModelError, gguf_to_hf

from .conftest import CONTEXT, tiny_hf, write_gguf

VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 3 + 40).unsqueeze(0)
    with torch.no_grad():
        return model(ids).logits


def converted(path: Path, **options: Any) -> Any:
    out = path.with_suffix("")
    gguf_to_hf(path, out, **options)
    return AutoModelForCausalLM.from_pretrained(out).eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_survive_the_round_trip(variant: str, tmp_path: Path) -> None:
    family, config = VARIANTS[variant]
    model = tiny_hf(family, **config)
    back = converted(write_gguf(model, tmp_path / "tiny.gguf"))
    assert torch.equal(logits(back), logits(model))
    assert back.config.tie_word_embeddings is config.get("tie_word_embeddings", False)
    assert back.generation_config.eos_token_id == 2


def test_quantised_weights_become_the_values_they_stand_for(tmp_path: Path) -> None:
    model = tiny_hf("qwen2")
    kind = gguf.GGMLQuantizationType.Q4_1
    back = converted(write_gguf(model, tmp_path / "tiny.gguf", quantised=kind))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.tensor(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)))
    assert torch.equal(logits(back), logits(model))


def test_bfloat16_on_request(tmp_path: Path) -> None:
    model = tiny_hf("llama")
    back = converted(write_gguf(model, tmp_path / "tiny.gguf"), dtype="bfloat16")
    assert back.dtype == torch.bfloat16
    for name, weights in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weights.to(torch.bfloat16)), name


def llama3_factors(factor: float, theta: float = 500.0, head_dim: int = 16) -> np.ndarray:
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (8192 / wavelength - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.select([wavelength < 2048, wavelength > 8192], [1.0, factor], between).astype(np.float32)


def test_llama3_rope_scaling_is_recovered(tmp_path: Path) -> None:
    theta = 500_000.0
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_hf("llama", rope_parameters=rope)
    factors = llama3_factors(8.0, theta)
    path = write_gguf(
        model, tmp_path / "tiny.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    back = converted(path)
    assert back.config.rope_parameters == rope
    torch.testing.assert_close(logits(back), logits(model))


def add_odd_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32))


def add_experts(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 64), np.float32))


def add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (add_odd_factors, "rope frequencies"),
        (add_experts, "blk.0.ffn_gate_exps.weight"),
        (add_yarn, "'yarn'"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    path = write_gguf(tiny_hf("llama"), tmp_path / "tiny.gguf", change=change)
    with pytest.raises(ModelError, match=says):
        gguf_to_hf(path, tmp_path / "out")


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    model = tiny_hf("qwen2")
    del model.model.layers[1].mlp.down_proj
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight, shape missing"):
        gguf_to_hf(write_gguf(model, tmp_path / "tiny.gguf"), tmp_path / "out")


def test_other_architectures_and_other_files_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "falcon.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'falcon'; convertible are llama, qwen2, qwen3"):
        gguf_to_hf(tmp_path / "falcon.gguf", tmp_path / "out")
    for content in (b"", b"GGUF", b"not a model" * 100):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            gguf_to_hf(tmp_path / "bad.gguf", tmp_path / "out")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tiny_hf("llama"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        gguf_to_hf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["Ċ", "Ċ", "12", "3", "he"]),
        ("smollm", ["ĊĊ", "1", "2", "3", "he"]),
        ("llama-bpe", ["ĊĊ", "12", "3", "he"]),
        ("qwen2", ["ĊĊ", "1", "2", "3", "he"]),
    ],
)
def test_text_is_split_the_way_the_vocabulary_was_learned(
    pre: str, tokens: list[str], tmp_path: Path
) -> None:
    gguf_to_hf(write_gguf(tiny_hf("llama"), tmp_path / "tiny.gguf", pre=pre), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("\n\n123he") == tokens
    assert tokenizer.tokenize("<|im_start|>he") == ["<|im_start|>", "he"]
    assert tokenizer.decode(tokenizer("  héé\n\n12").input_ids) == "  héé\n\n12"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.model_max_length == CONTEXT
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>user\nhe<|im_end|>\n"


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tiny_hf("llama"), tmp_path / "tiny.gguf", pre="some-new-one")
    with pytest.raises(ModelError, match="'some-new-one'; known are default"):
        gguf_to_hf(path, tmp_path / "out")


def test_a_second_end_token_is_kept(tmp_path: Path) -> None:
    path = write_gguf(
        tiny_hf("qwen2"), tmp_path / "tiny.gguf", change=lambda writer: writer.add_eot_token_id(0)
    )
    assert converted(path).generation_config.eos_token_id == [2, 0]
