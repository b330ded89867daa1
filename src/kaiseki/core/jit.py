"""The one place where functions are handed to Numba."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])

_IMPORT = re.compile(r"^(?:from|import) (kaiseki[\w.]*)", re.MULTILINE)


def njit(fn: F) -> F:
    """Compile `fn` on first call, cached on disk, without the GIL.

    With NUMBA_DISABLE_JIT=1 the function is returned as it is and runs as ordinary Python. Numba has
    no type hints of its own, so the cast keeps the signature that was written.

    Numba takes a cached function for fresh while the file it stands in is unchanged, but the functions
    and constants it uses come from other files too. So the cache is stamped with all of them.
    """
    compiled: Any = numba.njit(cache=True, nogil=True)(fn)
    stored = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if stored is not None and fn.__module__.startswith("kaiseki."):
        stored._source_stamp = _stamp(fn.__module__)
    return cast(F, compiled)


@cache
def _stamp(module: str) -> str:
    """Digest of the sources of a module and of everything of ours that it imports, however indirectly."""
    digest = hashlib.sha256()
    waiting, seen = [module], {module}
    while waiting:
        source = inspect.getsource(importlib.import_module(waiting.pop()))
        digest.update(source.encode())
        found = set(_IMPORT.findall(source)) - seen
        seen |= found
        waiting += sorted(found)
    return digest.hexdigest()
