"""The targets of recent arrivals: how soon the next one may want its first token."""

from __future__ import annotations

from collections import deque

from kaiseki.core.requests import NEVER_NS

REMEMBERED_SLOTS = 10_000
"""For how long the next arrival is expected to have a target that was seen before."""


class RecentTargets:
    """The tightest TTFT among the arrivals of the last `REMEMBERED_SLOTS` slots."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque()  # (slot, ns), the targets rising

    def add(self, slot: int, ttft_ns: int) -> None:
        """One arrived; those seen before it that are no tighter can't be the tightest again."""
        while self._seen and self._seen[-1][1] >= ttft_ns:
            self._seen.pop()
        self._seen.append((slot, ttft_ns))

    def tightest_ns(self, slot: int) -> int:
        """As of this slot; NEVER_NS without any."""
        while self._seen and self._seen[0][0] < slot - REMEMBERED_SLOTS:
            self._seen.popleft()
        return self._seen[0][1] if self._seen else NEVER_NS
