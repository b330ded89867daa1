"""What the embedded engine's compiled loops have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import torch

from kaiseki.core.jit import stamped

F = TypeVar("F", bound=Callable[..., object])
F32 = npt.NDArray[np.float32]
Elements = npt.NDArray[Any]
"""float32, or bfloat16 shown as uint16."""

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered (to use vector registers) and multiply-adds fused; NaN and infinity still count."""
SERIAL_ROWS = 32
"""Up to this many rows, waking other threads takes longer than a small loop over all rows on one."""

LOG2_E = np.float32(1.4426950408889634)
LEAST_EXPONENT, MOST_EXPONENT = np.float32(-126), np.float32(127)


def kernel(*, parallel: bool = False) -> Callable[[F], F]:
    """Compile a function on its first call, without the GIL, cached on disk.

    A function must not be compiled both ways: Numba's cache could not tell them apart.
    """

    def compiled(fn: F) -> F:
        made = numba.njit(parallel=parallel, fastmath=FASTMATH, nogil=True, cache=True)(fn)
        return cast(F, stamped(made, fn.__module__))

    return compiled


def view(tensor: torch.Tensor) -> Elements:
    """A contiguous NumPy view (of a copy, if need be) for kernels; bfloat16 shows as uint16."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@kernel()
def exp(x: np.float32) -> np.float32:
    """E to the x, to 6e-6 of it, and to 2e-7 of 1 when x < 0. Vectorises, unlike math.exp."""
    y = min(max(x * LOG2_E, LEAST_EXPONENT), MOST_EXPONENT)
    whole = np.floor(y + np.float32(0.5))
    r = y - whole
    p = np.float32(1.535336188319500e-4)
    p = p * r + np.float32(1.339887440266574e-3)
    p = p * r + np.float32(9.618437357674640e-3)
    p = p * r + np.float32(5.550332471162809e-2)
    p = p * r + np.float32(2.402264791363012e-1)
    p = p * r + np.float32(6.931472028550421e-1)
    p = p * r + np.float32(1)
    scale = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(p * scale)
