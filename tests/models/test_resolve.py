"""What a user may call a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kaiseki.models import ModelError, gguf_to_hf, resolve_model

from .conftest import tiny_hf, write_gguf


def test_a_folder_is_itself(tmp_path: Path, cache: Path) -> None:
    gguf_to_hf(write_gguf(tiny_hf("llama"), tmp_path / "tiny.gguf"), tmp_path / "tiny")
    assert resolve_model(tmp_path / "tiny") == tmp_path / "tiny"
    (tmp_path / "tiny" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"lacks a tokenizer \(tokenizer\.json or"):
        resolve_model(tmp_path / "tiny")


def test_a_gguf_file_is_converted_once_per_content(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tiny_hf("llama"), tmp_path / "My Model.gguf")
    folder = resolve_model(path)
    assert folder.parent == cache / "models"
    assert folder.name.startswith("my-model-")
    made = folder.stat().st_mtime_ns
    assert resolve_model(str(path)) == folder
    assert folder.stat().st_mtime_ns == made
    write_gguf(tiny_hf("qwen3"), path)
    assert resolve_model(path) != folder


def test_a_broken_gguf_file_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no")
    with pytest.raises(ModelError, match=r"bad\.gguf is not a readable GGUF"):
        resolve_model(tmp_path / "bad.gguf")
    assert not list((cache / "models").iterdir())


@pytest.mark.parametrize("name", ["nonsense", "no/such/folder", "weights.bin"])
def test_anything_else_is_told_what_is_allowed(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(
        ModelError, match=r"expected smollm2-135m-instruct, a folder .*, a \.gguf file, or a model"
    ):
        resolve_model(name)


def test_a_hub_name_is_asked_for_at_the_hub(cache: Path) -> None:
    with pytest.raises(ModelError, match="org/tiny cannot be had from the model hub"):
        resolve_model("org/tiny")
