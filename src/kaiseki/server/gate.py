"""Refuses work that would overfill the queue before any effort is spent on it.

The scheduler has the same limits and the last word, but it hears of a request only once its prompt is
tokenised. A burst of long prompts would spend seconds on that and be refused then. So the limits also
apply here, to an estimate from the size of the text, together with what already waits behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kaiseki.config import Scheduling
from kaiseki.core.reasons import Reason
from kaiseki.observe.metrics import Bins
from kaiseki.server.errors import ApiError
from kaiseki.server.seams import Backlog

BYTES_PER_TOKEN = 4
"""Typical of English text; others have fewer, so the estimate errs towards letting requests in."""


class Gate:
    """Counts the requests that are being prepared; only the event loop's thread may use it."""

    def __init__(self, backlog: Backlog, bins: Bins, limits: Scheduling) -> None:
        self._backlog = backlog
        self._bins = bins
        self._max_requests = limits.max_waiting
        self._max_tokens = limits.max_waiting_tokens
        self._requests = 0
        self._tokens = 0

    @contextmanager
    def preparing(self, requests: int, prompt_bytes: int) -> Iterator[None]:
        """Hold a place while a request's prompt is tokenised and until it is submitted.

        Raises:
            ApiError: 429, the queue is full.
        """
        tokens = prompt_bytes // BYTES_PER_TOKEN
        self._check(requests, tokens)
        self._requests += requests
        self._tokens += tokens
        try:
            yield
        finally:
            self._requests -= requests
            self._tokens -= tokens

    def _check(self, requests: int, tokens: int) -> None:
        if not self._max_requests and not self._max_tokens:
            return
        waiting, waiting_tokens = self._backlog()
        waiting += self._requests
        waiting_tokens += self._tokens
        if self._max_requests and waiting + requests > self._max_requests:
            what = f"{waiting} requests are waiting, the limit is {self._max_requests}"
        elif self._max_tokens and waiting_tokens + tokens > self._max_tokens:
            what = (
                f"about {waiting_tokens} prompt tokens are waiting, this request has about {tokens}, "
                f"and the limit is {self._max_tokens}"
            )
        else:
            return
        reason = Reason.QUEUE_FULL
        message = f"Request refused: {reason.sentence} ({what})."
        raise ApiError(429, message, code=reason.label, retry_after_s=self._retry_after_s(waiting_tokens))

    def _retry_after_s(self, waiting_tokens: int) -> float:
        """When the queue should be empty, at the average speed so far."""
        busy_s, computed = float(self._bins.slot.sums[0]), float(self._bins.slot_tokens.sums[0])
        return min(waiting_tokens * busy_s / computed, 60.0) if computed else 1.0
