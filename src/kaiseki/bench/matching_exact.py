"""What matching could reach at best: the exact optimum of small cases, the LP bound of large ones."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from kaiseki.core.decision import F64


@dataclass(frozen=True, slots=True)
class Instance:
    """Chunks to be placed on cards; whole numbers except `value`.

    Attributes:
        value, time, kv: float64[n, m], see `kaiseki.core.matching.assign`.
        room_time, room_kv: float64[m], capacities.
    """

    value: F64
    time: F64
    kv: F64
    room_time: F64
    room_kv: F64


@dataclass(frozen=True, slots=True)
class Best:
    """An upper bound of the worth, and what reaches it.

    Attributes:
        worth: of the optimum, or of the LP.
        shares: float64[n, m], 0 or 1 in the optimum, anything between in the LP.
    """

    worth: float
    shares: F64


def solve(instance: Instance, *, whole: bool) -> Best:
    """Maximise the worth with HiGHS; `whole` for the exact optimum, else parts of chunks may be placed.

    Raises:
        RuntimeError: HiGHS did not get to the end.
    """
    chunks, cards = instance.value.shape
    pairs = np.arange(chunks * cards)
    chunk, card = np.divmod(pairs, cards)
    coefficients = np.concatenate([np.ones(pairs.size), instance.time.ravel(), instance.kv.ravel()])
    rows = np.concatenate([chunk, chunks + card, chunks + cards + card])
    taken = csr_array((coefficients, (rows, np.tile(pairs, 3))), shape=(chunks + 2 * cards, pairs.size))
    most = np.concatenate([np.ones(chunks), instance.room_time, instance.room_kv])
    with _silent():
        found = milp(
            -instance.value.ravel(),
            integrality=np.full(pairs.size, int(whole)),
            constraints=LinearConstraint(taken, -np.inf, most),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-6},
        )
    if found.status != 0:
        raise RuntimeError(f"HiGHS: {found.message}")
    return Best(-float(found.fun), found.x.reshape(chunks, cards))


@contextmanager
def _silent() -> Iterator[None]:
    """HiGHS leaves a debugging print in, past `sys.stdout`; nothing may come between the lines of JSON."""
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
