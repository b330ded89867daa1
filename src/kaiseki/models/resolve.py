"""From what a user calls a model to the folder it can be loaded from."""

from __future__ import annotations

import os
from pathlib import Path

from kaiseki.models import store
from kaiseki.models.fetch import KNOWN_MODELS, convert, is_hub_id, pull
from kaiseki.models.progress import Progress, quiet
from kaiseki.models.store import ModelError


def resolve_model(
    name_or_path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress = quiet,
) -> Path:
    """The Hugging Face folder of a model, fetched or converted first when that is needed.

    Args:
        name_or_path: in this order: a name that `kaiseki pull` knows, a model folder, a `.gguf`
            file (converted once per content), or a hub repository `organisation/name`.
        cache_dir: the cache; see `store.cache_root`.
        progress: told what is being done.

    Raises:
        ModelError: it is none of these, or cannot be fetched, converted or loaded.
    """
    name = os.fspath(name_or_path)
    if name in KNOWN_MODELS:
        return pull(name, cache_dir, progress=progress).path
    path = Path(name).expanduser()
    if path.is_dir():
        if missing := store.missing_from(path):
            raise ModelError(f"the folder {path} is no complete model: it lacks {', '.join(missing)}")
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, store.cache_root(cache_dir), progress)
    if not path.exists() and is_hub_id(name):
        return pull(name, cache_dir, progress=progress).path
    raise no_model(name)


def check_name(name_or_path: str) -> None:
    """Tell a name that can't be a model before anything slow is begun.

    Raises:
        ModelError: it is none that is known, no folder or file, and no repository's name.
    """
    path = Path(name_or_path).expanduser()
    known = name_or_path in KNOWN_MODELS or path.is_dir() or is_hub_id(name_or_path)
    if not known and not (path.is_file() and path.suffix == ".gguf"):
        raise no_model(name_or_path)


def no_model(name: str) -> ModelError:
    """What to say of something that is no model."""
    there = "" if Path(name).expanduser().exists() else ", and there is no such file or folder"
    return ModelError(
        f"{name!r} is no model{there}: expected {' or '.join(KNOWN_MODELS)}, a folder with config.json and "
        "safetensors, a .gguf file, or a model hub repository as organisation/name"
    )


def _converted(path: Path, root: Path, progress: Progress) -> Path:
    progress(f"hashing {path.name}", 0, 0)
    sha256 = store.sha256_file(path)
    with store.locked(root, sha256, progress):
        return convert(root, path.stem, path, sha256, progress)
