"""What is done about errors of the engine (B15): when to try again, and when to take no more requests."""

from __future__ import annotations

from dataclasses import dataclass

MS = 1_000_000
S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Recovery:
    """Settings.

    Attributes:
        max_retries: how often a request goes on after an engine error that may pass.
        backoff_ms: how long it waits before the first retry; twice as long before each further one,
        backoff_max_ms: up to this.
        failing_steps: after so many steps in a row in which every request failed, no more are taken
            until a step works; 0 takes them whatever happens.
        probe_s: how often a small request of our own tries whether it works again.
    """

    max_retries: int = 2
    backoff_ms: float = 50.0
    backoff_max_ms: float = 2000.0
    failing_steps: int = 5
    probe_s: float = 1.0

    def backoff_ns(self, failures: int) -> int:
        """How long a request waits after it has failed so many times."""
        return int(min(self.backoff_ms * 2.0 ** (failures - 1), self.backoff_max_ms) * MS)


class Breaker:
    """Tells an engine that fails on everything from one that fails on some requests.

    It opens after so many steps in a row in which every request failed, and closes with the first in
    which one did not. While it is open, `probe_due` says when to try.
    """

    def __init__(self, recovery: Recovery) -> None:
        self.retry_after_s = recovery.probe_s
        self._most = recovery.failing_steps
        self._probe_ns = int(recovery.probe_s * S)
        self._steps = 0
        self._message = ""
        self._next_ns = 0

    @property
    def open(self) -> bool:
        """Whether everything fails."""
        return 0 < self._most <= self._steps

    @property
    def reason(self) -> str:
        """What happened, for people; empty while it is closed."""
        if not self.open:
            return ""
        return f"the last {self._steps} steps of the engine failed for every request, with {self._message}"

    def worked(self) -> None:
        """A step in which somebody got what was asked for."""
        self._steps = 0

    def failed(self, message: str, now: int) -> None:
        """A step in which everybody failed."""
        self._steps += 1
        self._message = message
        if self.open:
            self._next_ns = now + self._probe_ns

    def probed(self, now: int) -> None:
        """A probe goes out; if nothing is heard of it, the next one follows after the usual time."""
        self._next_ns = now + self._probe_ns

    def until_probe_ns(self, now: int) -> int | None:
        """How long until the next probe is due, 0 when it is; None while it is closed."""
        return max(0, self._next_ns - now) if self.open else None
