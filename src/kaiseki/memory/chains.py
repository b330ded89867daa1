"""Where the block digests of registered rows are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kaiseki.core.decision import I32
from kaiseki.memory.hashing import DIGEST_BYTES, join_digests
from kaiseki.memory.layout import COUNT, LANE, OFFSET, REQUEST_FIELDS, ROOM


def doubled(size: int, wanted: int) -> int:
    """`size` doubled until it is at least `wanted`."""
    while size < wanted:
        size *= 2
    return size


class ChainStore:
    """One arena of digests for all rows, so that compiled code can compare them in place.

    A row costs 16 bytes plus 32 per digest. Room is given out in steps of at most a quarter and is reused
    by rows of the same step; it is never given back, so the arena is as large as the sum over steps
    of the most that step ever needed.

    Attributes:
        requests: int32[N, REQUEST_FIELDS], grows by doubling.
        chain: int32[M, 8], grows by doubling.
    """

    def __init__(self, rows: int) -> None:
        self.requests: I32 = _blank(rows)
        self.chain: I32 = np.zeros((rows, 8), np.int32)
        self._bytes = self.chain.data.cast("B")
        self._used = 0
        self._spare: dict[int, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_bytes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bytes = self.chain.data.cast("B")

    def put(self, row: int, digests: Sequence[bytes]) -> None:
        """Replace the row's chain, which may be new, by these digests."""
        words = join_digests(digests)
        if row >= self.requests.shape[0]:
            more = _blank(doubled(self.requests.shape[0], row + 1) - self.requests.shape[0])
            self.requests = np.concatenate([self.requests, more])
        self._write(row, words)

    def append(self, row: int, digests: Sequence[bytes]) -> None:
        """Lengthen the row's chain."""
        start = self.requests.item(row, OFFSET) * DIGEST_BYTES
        end = start + self.requests.item(row, COUNT) * DIGEST_BYTES
        self._write(row, bytes(self._bytes[start:end]) + join_digests(digests))

    def clear(self, row: int) -> None:
        """Forget the row's digests."""
        self._give_back(row)
        self.requests[row, OFFSET:] = 0

    def audit(self) -> None:
        """Check that no two rows, and no row and spare room, overlap, and that nothing is lost.

        Raises:
            AssertionError: naming what is wrong.
        """
        spans = [(o, o + room) for _, o, _, room in self.requests[self.requests[:, ROOM] > 0].tolist()]
        spans += [(o, o + room) for room, offsets in self._spare.items() for o in offsets]
        at = 0
        for start, end in sorted(spans):
            assert start == at, f"digest room [{at}, {start}) is lost or given out twice"
            at = end
        assert at == self._used, f"digest room [{at}, {self._used}) is lost"
        assert (self.requests[:, COUNT] <= self.requests[:, ROOM]).all(), "more digests than room"

    def _write(self, row: int, words: bytes) -> None:
        """Store a chain at the row's place, or at a new one if it has outgrown that."""
        count = len(words) // DIGEST_BYTES
        if count > self.requests.item(row, ROOM):
            self._give_back(row)
            room = _room(count)
            self.requests[row, OFFSET] = self._place(room)
            self.requests[row, ROOM] = room
        start = self.requests.item(row, OFFSET) * DIGEST_BYTES
        self._bytes[start : start + len(words)] = words
        self.requests[row, COUNT] = count

    def _give_back(self, row: int) -> None:
        """Put the row's room aside for others."""
        room = self.requests.item(row, ROOM)
        if room:
            self._spare.setdefault(room, []).append(self.requests.item(row, OFFSET))

    def _place(self, room: int) -> int:
        """Where `room` digests can be stored."""
        spare = self._spare.get(room)
        if spare:
            return spare.pop()
        offset = self._used
        self._used += room
        if self._used > self.chain.shape[0]:
            grown = np.zeros((doubled(self.chain.shape[0], self._used), 8), np.int32)
            grown[:offset] = self.chain[:offset]
            self.chain = grown
            self._bytes = grown.data.cast("B")
        return offset


def _blank(rows: int) -> I32:
    """int32[rows, REQUEST_FIELDS] of rows without lane and digests."""
    requests = np.zeros((rows, REQUEST_FIELDS), np.int32)
    requests[:, LANE] = -1
    return requests


def _room(count: int) -> int:
    """`count` rounded up so that few different sizes occur and at most a quarter is wasted."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step
