"""How fast work gets done lately, under the load there is: what a lone-time estimate can't say."""

from __future__ import annotations

_MEMORY = 1.0 / 32.0


class Pace:
    """Running means over recent steps.

    Args:
        token_ns, slot_ns: what to assume before anything was measured.
    """

    def __init__(self, token_ns: float, slot_ns: float) -> None:
        self._tokens = 1.0
        self._prefill_ns = token_ns
        self.slot_ns = slot_ns

    @property
    def token_ns(self) -> float:
        """Wall time per prefill token, decodes beside it included, ns."""
        return self._prefill_ns / self._tokens

    def observe(self, measured_ns: float, prefill_tokens: int) -> None:
        """Take in one step; steps without prefill tell nothing about the pace of prefill."""
        self.slot_ns += _MEMORY * (measured_ns - self.slot_ns)
        if prefill_tokens > 0:
            self._prefill_ns += _MEMORY * (measured_ns - self._prefill_ns)
            self._tokens += _MEMORY * (prefill_tokens - self._tokens)
