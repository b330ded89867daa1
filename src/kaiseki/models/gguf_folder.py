"""Turn a GGUF file of the Llama, Qwen2, Qwen3 or SmolLM family into a Hugging Face model folder.

A GGUF keeps the configuration under llama.cpp's names, the weights quantised and, for the `llama`
architecture, the rows of q and k in another order. Nothing is guessed: a file whose tensors or
settings are not all accounted for is refused, since a model that loads and talks nonsense is worse.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kaiseki.models.progress import Progress, quiet
from kaiseki.models.store import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_WHOLE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": f"{_CONTRACTIONS}|{_WORDS_AND_SPACES % '{1,3}'}",
    "qwen2": f"{_CONTRACTIONS}|{_WORDS_AND_SPACES % ''}",
}
"""How a byte-level vocabulary's text is split before merging, by `tokenizer.ggml.pre`."""


def gguf_to_hf(path: Path, out: Path, dtype: str = "float32", progress: Progress = quiet) -> None:
    """Write the model in the GGUF file `path` to the new folder `out`.

    The folder gets `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer
    with its chat template.

    Args:
        path: the GGUF file.
        out: folder to create; on an error it may be left incomplete.
        dtype: what the weights are stored as, `float32` (exact) or `bfloat16`.
        progress: told about each tensor.

    Raises:
        ModelError: the file is no GGUF, of another family, or has something this cannot carry over.
    """
    from transformers import GenerationConfig

    reader = _open(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(reader, tensors, dtype)
    _check_names(config, tensors)
    out.mkdir(parents=True)
    _write_weights(tensors, config, dtype, out / "model.safetensors", progress)
    config.save_pretrained(out)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(out)
    progress("converting the tokenizer", 0, 0)
    _tokenizer(path, reader, config).save_pretrained(out)


def _open(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    architecture = _get(reader, "general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{path} holds a model of architecture {architecture!r}; convertible are {known}")
    return reader


def _get(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _need(reader: GGUFReader, key: str) -> Any:
    if (value := _get(reader, key)) is None:
        raise ModelError(f"the GGUF file lacks the setting {key}")
    return value


def _float(value: float) -> float:
    """GGUF stores float32; the shortest decimal with that value is the number that was meant (1e-05)."""
    return float(str(np.float32(value)))


def _config(reader: GGUFReader, tensors: dict[str, ReaderTensor], dtype: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file has no token embeddings")
    arch = _need(reader, "general.architecture")
    heads = _need(reader, f"{arch}.attention.head_count")
    hidden = _need(reader, f"{arch}.embedding_length")
    # Which of the two gives the head size depends on the age of the file; without both it is the quotient.
    rope_width = _get(reader, f"{arch}.rope.dimension_count", hidden // heads)
    head_dim = _get(reader, f"{arch}.attention.key_length", rope_width)
    biases = {}
    if arch == "llama":
        biases["attention_bias"] = "blk.0.attn_q.bias" in tensors
        biases["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    config: PreTrainedConfig = AutoConfig.for_model(
        arch,
        architectures=[f"{arch.capitalize()}ForCausalLM"],
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=_need(reader, f"{arch}.feed_forward_length"),
        num_hidden_layers=_need(reader, f"{arch}.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_get(reader, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=_need(reader, f"{arch}.context_length"),
        rms_norm_eps=_float(_need(reader, f"{arch}.attention.layer_norm_rms_epsilon")),
        rope_parameters=_rope(reader, arch, tensors.get(_ROPE_FACTORS), head_dim),
        tie_word_embeddings="output.weight" not in tensors,
        dtype=dtype,
        **biases,
        **_special_ids(reader),
    )
    return config


def _rope(reader: GGUFReader, arch: str, factors: ReaderTensor | None, head_dim: int) -> dict[str, Any]:
    theta = _float(_get(reader, f"{arch}.rope.freq_base", 1e4))
    scaling = _get(reader, f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"GGUF files with rope scaling of type {scaling!r} are not supported")
    if factors is None:
        return {"rope_type": "default", "rope_theta": theta}
    return _llama3_rope(_dequantised(factors), theta, head_dim)


def _special_ids(reader: GGUFReader) -> dict[str, Any]:
    """Special token ids. A chat model may end its turn (`eot`) with another token than its text (`eos`)."""
    prefix = "tokenizer.ggml."
    ends = [_get(reader, f"{prefix}{name}_token_id") for name in ("eos", "eot")]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": _get(reader, f"{prefix}bos_token_id"),
        "eos_token_id": distinct if len(distinct) > 1 else (distinct or [None])[0],
        "pad_token_id": _get(reader, f"{prefix}padding_token_id"),
    }


def _llama3_rope(factors: npt.NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any]:
    """Rope parameters whose frequency divisors are `factors`, the way Llama 3.1 and 3.2 scale them.

    A GGUF has only the divisors. All published models use low 1, high 4 and 8,192 original
    positions, and the largest divisor is the factor; whether that gives this file's is checked.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(
            "the GGUF file does not scale rope frequencies as Llama 3 does; others are not supported"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None if it has none."""
    stem, _, kind = name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        part = _LAYER_NAMES.get(layer[2])
        return part and f"model.layers.{layer[1]}.{part}.{kind}"
    whole = _WHOLE_NAMES.get(stem)
    return whole and f"{whole}.{kind}"


def _check_names(config: PreTrainedConfig, tensors: dict[str, ReaderTensor]) -> None:
    """Raise ModelError unless the tensors are those of the model that `config` describes."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    found = {
        _hf_name(name) or name: tuple(int(n) for n in reversed(tensor.shape))
        for name, tensor in tensors.items()
        if name != _ROPE_FACTORS
    }
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ModelError(
            f"{len(wrong)} tensors of the GGUF file don't match its settings; "
            f"first: {name}, shape {found.get(name, 'missing')}, expected {expected.get(name, 'none')}"
        )


def _dequantised(tensor: ReaderTensor) -> npt.NDArray[np.float32]:
    from gguf import dequantize

    try:
        weights: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ModelError(f"tensor {tensor.name} is quantised as {kind}, which cannot be converted") from error
    return weights


def _unpermuted(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of the rows within each head, which pairs (i, i + half) as neighbours."""
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, half, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _write_weights(
    tensors: dict[str, ReaderTensor], config: PreTrainedConfig, dtype: str, out: Path, progress: Progress
) -> None:
    import torch
    from safetensors.torch import save_file

    permuted_heads = {}
    if config.model_type == "llama":
        permuted_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for count, (name, tensor) in enumerate(tensors.items(), 1):
        progress("converting weights", count, len(tensors))
        if (hf_name := _hf_name(name)) is None:
            continue
        weights = _dequantised(tensor)
        if heads := permuted_heads.get(name.split(".")[-2]):
            weights = _unpermuted(weights, heads)
        state[hf_name] = torch.tensor(weights, dtype=getattr(torch, dtype))
    progress("writing weights", 0, 0)
    save_file(state, out, metadata={"format": "pt"})


def _tokenizer(path: Path, reader: GGUFReader, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    # Alone in a folder, or a tokenizer_config.json that lies beside the file would be mixed in.
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "model.gguf").symlink_to(path.resolve())
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf")
    if _get(reader, "tokenizer.ggml.model") == "gpt2":
        kind = _get(reader, "tokenizer.ggml.pre", "default")
        tokenizer.backend_tokenizer.pre_tokenizer = _byte_level_split(kind)
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer


def _byte_level_split(kind: str) -> Any:
    """The tokenizers library's pre-tokenizer for a `tokenizer.ggml.pre`.

    Set here because merges learned under one split give other, worse tokens under another: with
    GPT-2's, an empty line before "1." no longer is SmolLM's one token for it.
    """
    from tokenizers import Regex, pre_tokenizers

    if kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if kind in ("default", "gpt-2"):
        return words
    known = ", ".join(["default", "gpt-2", "smollm", *_SPLITS])
    raise ModelError(f"the GGUF file's tokenizer splits text in the way {kind!r}; known are {known}")
