"""The grid of prompt chunks, coarser while deciding takes too large a part of the slot (A6).

Small chunks follow the slot's bound closely and cost decisions. Where those get dear against the steps they
decide about, as with a small model or a slow processor, fewer and larger chunks are the better bargain.
"""

from __future__ import annotations

COARSEST = 8
"""Most by which the quantum grows."""
SETTLE_SLOTS = 32
"""Slots over which a change shows its effect before the next one."""
_MEMORY = 1.0 / 16.0
_SPARE = 0.25
"""The quantum shrinks again below this part of the allowed share: twice the chunks take at most twice the
time, so that what follows is still well within it and the quantum does not swing."""


class Quantum:
    """Doubles while decisions take more than their share of the slot, and halves again.

    Reads no clock: whoever runs the scheduler measures.

    Args:
        tokens: the finest quantum.
        share: most of a slot's time that deciding may take.
    """

    def __init__(self, tokens: int, share: float) -> None:
        self._finest = tokens
        self._most = share
        self._decide_ns = 0.0
        self._slot_ns = 0.0
        self._settling = SETTLE_SLOTS
        self.tokens = tokens

    @property
    def share(self) -> float:
        """Part of recent slots' time that deciding took."""
        return self._decide_ns / self._slot_ns if self._slot_ns > 0.0 else 0.0

    def observe(self, decide_ns: float, slot_ns: float) -> None:
        """Take in one slot: time to decide and to apply its result, and how long the step took."""
        self._decide_ns += _MEMORY * (decide_ns - self._decide_ns)
        self._slot_ns += _MEMORY * (slot_ns - self._slot_ns)
        self._settling -= 1
        if self._settling > 0:
            return
        if self.share > self._most and self.tokens < COARSEST * self._finest:
            self.tokens *= 2
        elif self.share < _SPARE * self._most and self.tokens > self._finest:
            self.tokens //= 2
        else:
            return
        self._settling = SETTLE_SLOTS
