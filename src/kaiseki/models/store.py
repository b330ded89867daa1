"""The model cache on disk: where it is, what makes a folder complete, and making one atomically."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from kaiseki.models.progress import Progress

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class ModelError(RuntimeError):
    """A model cannot be had; the message says why and what to do, in words for the user."""


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: `cache_dir`, else `$KAISEKI_CACHE`, else the user's cache folder."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().resolve()
    if from_env := os.environ.get("KAISEKI_CACHE"):
        return Path(from_env).expanduser().resolve()
    return Path(platformdirs.user_cache_dir("kaiseki"))


def slug(name: str) -> str:
    """`name` as a file name."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.").lower() or "model"


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a model folder's weights are in, whether or not all are there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return [folder / "model.safetensors"]


def weights_sha256(folder: Path) -> str:
    """SHA-256 of the weights: of the file, or of the lines "digest name" when they are in several."""
    files = weight_files(folder)
    if len(files) == 1:
        return sha256_file(files[0])
    lines = "".join(f"{sha256_file(file)} {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def missing_from(folder: Path) -> list[str]:
    """What a folder lacks to be loaded as a Hugging Face model; empty when it is complete."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += [file.name for file in weight_files(folder) if not file.is_file()]
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZER_FILES)})")
    return missing


@contextmanager
def locked(root: Path, name: str, progress: Progress) -> Iterator[None]:
    """Keep other processes and threads from working on `name`. A killed owner's lock is free at once."""
    locks = root / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that is fetching {name}", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return `target`, made by `make(partial path)` first if it isn't there.

    What is half made is under another name and renamed at the end, so that `target` exists only when
    complete. Call it with the lock of `target` held.

    Raises:
        ModelError: the disk is full or the cache cannot be written.
    """
    if target.exists():
        return target
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        make(partial)
        partial.rename(target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error}") from error
    finally:
        remove(partial)
    return target


def remove(path: Path) -> None:
    """Remove a file or folder if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
