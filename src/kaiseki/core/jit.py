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

_njit: Any = numba.njit
"""Its type hints leave out the compiler's own flags."""
_IMPORT = re.compile(r"^(?:from|import) (kaiseki[\w.]*)", re.MULTILINE)


def njit(fn: F) -> F:
    """Compile `fn` on first call, cached on disk, without the GIL.

    With NUMBA_DISABLE_JIT=1 the function is returned as it is and runs as ordinary Python. Numba has
    no type hints of its own, so the cast keeps the signature that was written.
    """
    return cast(F, stamped(_njit(cache=True, nogil=True)(fn), fn.__module__))


def kernel(fn: F) -> F:
    """As `njit`, for functions that make no arrays: they only work on those they are given.

    Numba otherwise counts references whenever an array is passed on or taken out of a tuple; in a loop
    that calls small functions, that costs several times what the loop does.
    """
    return cast(F, stamped(_njit(cache=True, nogil=True, _nrt=False)(fn), fn.__module__))


def inlined(fn: F) -> F:
    """As `kernel`, for small functions that other compiled ones call: no call remains.

    A tuple of ten arrays is passed on as ninety words, more work than most of what is done with it.
    """
    made = _njit(cache=True, nogil=True, _nrt=False, forceinline=True)(fn)
    return cast(F, stamped(made, fn.__module__))


def stamped(compiled: Any, module: str) -> Any:
    """Have the function's stored code count as stale once anything it uses has changed.

    Numba itself looks only at the file the function stands in, but the functions and constants it
    uses come from other files too.
    """
    stored = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if stored is not None and module.startswith("kaiseki."):
        stored._source_stamp = _stamp(module)
    return compiled


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
