"""One pool of threads for Torch and for compiled kernels."""

from __future__ import annotations

import os

import numba
import torch


def available_threads() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_threads(threads: int) -> None:
    """Let Torch and Numba use `threads` threads of the same OpenMP runtime.

    Torch brings a libgomp of its own and makes its symbols global when it is imported; Numba's `omp`
    layer, loaded later, binds to those. Both then run parallel regions on the pool of the calling
    thread, so there is nothing that could spin against anything. All steps run on one thread, which
    has to call this.
    """
    numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, available_threads()))
