"""KV of stopped rows in host memory: which pages, and what the engine has to move.

A row's *private* pages, those from the first that no other row holds, go out in whole and come back in whole;
the pages before them are found in the cache, or what was kept is of no use and is dropped. Moves are done in
the order in which they were noted, before the step of the decision that brings them: so a block may be given
away, and host memory used again, as soon as its move is noted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kaiseki.core.decision import I32, Way


class Kept(NamedTuple):
    """What is kept of a row: its pages from `first` on, up to position `tokens`, in these host blocks."""

    first: int
    tokens: int
    blocks: list[int]


class HostSpace:
    """So many blocks of host memory, whose content only the engine sees."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.kept: dict[int, Kept] = {}  # by row
        self._free = list(range(blocks - 1, -1, -1))
        self._moves: list[tuple[Way, int, int]] = []

    def put(self, row: int, first: int, tokens: int, blocks: list[int]) -> bool:
        """Keep a row's pages from `first` on, which are in these blocks; False if there is no room.

        What was kept of the row before is dropped.
        """
        self.drop(row)
        if not blocks or len(blocks) > len(self._free):
            return False
        kept = Kept(first, tokens, [self._free.pop() for _ in blocks])
        self._moves += [(Way.OUT, block, host) for block, host in zip(blocks, kept.blocks, strict=True)]
        self.kept[row] = kept
        return True

    def bring(self, row: int, first: int, blocks: list[int]) -> None:
        """Bring the row's pages from `first` on into these blocks, and keep it no longer."""
        kept = self.kept[row]
        hosts = kept.blocks[first - kept.first :]
        self._moves += [(Way.IN, host, block) for host, block in zip(hosts, blocks, strict=False)]
        self.drop(row)

    def drop(self, row: int) -> None:
        """Keep nothing of the row any more."""
        kept = self.kept.pop(row, None)
        if kept is not None:
            self._free += kept.blocks

    def restorable(self, row: int, pages: int, limit: int) -> int:
        """Tokens that the row would have, within `limit`, with so many pages of its prefix in the cache."""
        kept = self.kept.get(row)
        return min(kept.tokens, limit) if kept is not None and pages >= kept.first else 0

    def take_moves(self) -> I32:
        """int32[k, 3]: moves (way, source, destination) noted since the last call, in order."""
        moves, self._moves = np.array(self._moves, np.int32).reshape(-1, 3), []
        return moves

    def audit(self) -> None:
        """Check that every host block is free or kept for one row.

        Raises:
            AssertionError: naming what is wrong.
        """
        used = [block for kept in self.kept.values() for block in kept.blocks]
        assert sorted(used + self._free) == list(range(self.blocks)), "host blocks leaked, or given out twice"
