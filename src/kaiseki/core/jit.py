"""The one place where functions are handed to Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def njit(fn: F) -> F:
    """Compile `fn` on first call, cached on disk, without the GIL.

    With NUMBA_DISABLE_JIT=1 the function is returned as it is and runs as ordinary Python. Numba has
    no type hints of its own, so the cast keeps the signature that was written.
    """
    return cast(F, numba.njit(cache=True, nogil=True)(fn))
