"""What the scheduler of a rank says to the API servers, and they to it: one small file, mapped by both.

It is in a folder that only this user can read, named after vLLM's instance, one file per data-parallel
rank. Readers take what they find: each figure is written whole, and a record of an ending is written
before its number.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from kaiseki.core.admission import Refusal
from kaiseki.core.reasons import Outcome, Reason

_KEPT = 4096
"""How a request ended can be looked up until so many others have ended badly."""
_FORMAT = 1


class Mode(IntEnum):
    """Who decides."""

    KAISEKI = 0
    SHADOW = 1  # vLLM does, and what Kaiseki would have done is recorded
    VLLM = 2  # the kill switch


STATE = np.dtype(
    [
        ("format", np.int64),
        ("pid", np.int64),
        ("mode", np.int64),
        ("wanted", np.int64),  # mode that an API server asks for, -1 for none
        ("slot", np.int64),
        ("beat_ns", np.int64),  # time of the last slot, monotonic
        ("running", np.int64),
        ("waiting", np.int64),
        ("waiting_tokens", np.int64),
        ("max_waiting", np.int64),  # limits; 0 for none
        ("max_waiting_tokens", np.int64),
        ("free_blocks", np.int64),
        ("total_blocks", np.int64),
        ("block_tokens", np.int64),
        ("drain_s", np.float64),  # how long the prompts that wait would take alone
        ("differing", np.int64),  # slots in which Kaiseki would have admitted others than vLLM did
        ("ended", np.int64),  # endings written so far
    ]
)
ENDED = np.dtype(
    [
        ("key", np.uint64),
        ("outcome", np.int32),
        ("reason", np.int32),
        ("retry_after_s", np.float64),
        ("numbers", "S240"),  # JSON
    ]
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended other than with its output; the fields are those of `engines.updates.Update`."""

    outcome: Outcome
    reason: Reason
    numbers: Mapping[str, float]
    retry_after_s: float | None


def folder(instance: str) -> Path:
    """Where the files of a vLLM instance are: `KAISEKI_RUN_DIR`, or a folder of its own without it."""
    given = os.environ.get("KAISEKI_RUN_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"kaiseki-{os.getuid()}" / instance


class Board:
    """One rank's file.

    Args:
        path: the file.
        create: make it, for the scheduler; API servers map what is there.

    Raises:
        OSError: it can't be made or read.
        ValueError: another version of Kaiseki has written it.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        size = STATE.itemsize + _KEPT * ENDED.itemsize
        if create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # who still reads an older one goes on with that
            with open(path, "xb") as file:
                file.truncate(size)
        elif path.stat().st_size != size:
            raise ValueError(f"{path}: not a file of this version of Kaiseki")
        raw = np.memmap(path, np.uint8, "r+", shape=(size,))
        self.path = path
        self.state = raw[: STATE.itemsize].view(STATE)[0:1]
        self._ended = raw[STATE.itemsize :].view(ENDED)
        if create:
            self.state["wanted"] = -1
            self.state["pid"] = os.getpid()
            self.state["format"] = _FORMAT
        elif int(self.state["format"][0]) != _FORMAT:
            raise ValueError(f"{path}: not a file of this version of Kaiseki")

    def write(self, **figures: float) -> None:
        """Publish figures of `STATE`."""
        for name, value in figures.items():
            self.state[name] = value

    def read(self, name: str) -> int:
        """One figure of `STATE`."""
        return int(self.state[name][0])

    def ended(self, key: int, outcome: Outcome, refusal: Refusal) -> None:
        """Say how a request ended; 0 is nobody's key."""
        if not key:
            return
        count = self.read("ended")
        record = self._ended[count % _KEPT : count % _KEPT + 1]
        record["key"] = 0
        record["outcome"], record["reason"] = int(outcome), int(refusal.reason)
        record["retry_after_s"] = np.nan if refusal.retry_after_s is None else refusal.retry_after_s
        record["numbers"] = json.dumps(dict(refusal.numbers)).encode()[: ENDED["numbers"].itemsize]
        record["key"] = key
        self.state["ended"] = count + 1

    def find(self, key: int) -> Ended | None:
        """How the request with this key ended, if it did so badly."""
        places = np.flatnonzero(self._ended["key"] == np.uint64(key))
        if not key or places.size == 0:
            return None
        record = self._ended[places[-1]]
        retry = float(record["retry_after_s"])
        try:
            numbers = json.loads(bytes(record["numbers"]) or b"{}")
        except ValueError:  # longer than there is room for
            numbers = {}
        return Ended(
            Outcome(int(record["outcome"])),
            Reason(int(record["reason"])),
            numbers,
            None if np.isnan(retry) else retry,
        )

    def close(self) -> None:
        """Take the file away; who has it mapped may go on reading."""
        self.path.unlink(missing_ok=True)
