"""The whole state of a scheduler as bytes, so that a replay can begin in the middle of a recording.

Pickle, read with an allow-list (`Unpickler.find_class`): a recording can come from anywhere, and must not be
able to run anything. What is written is read by the same version only; there is nothing to convert.
"""

from __future__ import annotations

import io
import pickle
from importlib import import_module
from typing import Any

from kaiseki.core.scheduler import Scheduler

_OURS = ("kaiseki.core.", "kaiseki.memory.", "kaiseki.cost.", "kaiseki.policies.")
_OTHERS = {
    ("collections", "deque"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
}


class UnreadableState(ValueError):
    """The state can't be read; the message says why."""


def dump(scheduler: Scheduler) -> bytes:
    """The scheduler with its policy, KV ledger, cost model and everything that waits or runs.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: something in it is bound to this process.
    """
    return pickle.dumps(scheduler, protocol=5)


def load(data: bytes) -> Scheduler:
    """A scheduler that goes on exactly where the one that was dumped was.

    Raises:
        UnreadableState: of another version, damaged, or with something in it that is not ours.
    """
    try:
        scheduler = _Restricted(io.BytesIO(data)).load()
    except UnreadableState:
        raise
    except Exception as error:  # damaged bytes can raise anything
        raise UnreadableState(f"the scheduler's state is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(scheduler, Scheduler):
        raise UnreadableState("the state is not a scheduler's")
    return scheduler


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Classes of the core and what it is made of, and what arrays need."""
        if (module, name) in _OTHERS:
            return getattr(import_module(module), name)
        if module.startswith(_OURS) and "." not in name:
            found = getattr(import_module(module), name, None)
            if isinstance(found, type):
                return found
        raise UnreadableState(f"the scheduler's state holds {module}.{name}, which is not loaded from files")
