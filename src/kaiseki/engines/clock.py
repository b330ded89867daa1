"""Time as an argument: a real clock for servers, a virtual one for tests and simulation."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Something that says what time it is, in integer nanoseconds."""

    def now_ns(self) -> int:
        """The time now."""
        ...

    def advance_to(self, when_ns: int) -> None:
        """Let time pass until then; an earlier time is ignored."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """`time.monotonic_ns()`."""
        return time.monotonic_ns()

    def advance_to(self, when_ns: int) -> None:
        """Sleep."""
        time.sleep(max(0, when_ns - self.now_ns()) / 1e9)


class VirtualClock:
    """A clock that moves only when told to.

    Args:
        start_ns: what it shows at first.
    """

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """What it was last set to."""
        return self._now_ns

    def advance_to(self, when_ns: int) -> None:
        """Move forward; an earlier time is ignored."""
        self._now_ns = max(self._now_ns, when_ns)
