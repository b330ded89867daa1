"""Arrays that are used again from slot to slot: a fresh one costs as much as a pass over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Scratch:
    """One array of a dtype. What was in it is gone when it is taken again."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._array: npt.NDArray[Any] = np.empty(64, dtype)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its own: what is in it, or in memory behind it, is nobody's business."""
        return {"_array": self._array[:0].copy()}

    def take(self, n: int) -> npt.NDArray[Any]:
        """The first `n` elements, with anything in them."""
        if n > self._array.size:
            self._array = np.empty(2 * n, self._array.dtype)
        return self._array[:n]
