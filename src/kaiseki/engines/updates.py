"""What the driver tells the owner of a request, one message per slot in which something happened to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kaiseki.core.reasons import Finish, Outcome, Reason


@dataclass(slots=True)
class Update:
    """News of one request.

    Attributes:
        request_id: whose.
        time_ns: engine clock when it was emitted.
        token_ids: new output tokens, oldest first; may be empty.
        payload: what the engine adds to these tokens (the embedded engine: `TokenOutput`s).
        outcome: OPEN while there is more to come; anything else ends the request.
        finish: why the output ended, when outcome is COMPLETED.
        reason: why, for any other outcome.
        numbers: the figures behind a refusal, by name (`need_blocks`, `pool_blocks`, ...).
        retry_after_s: when trying again makes sense, for a refusal that time can cure.
        cached_tokens: prompt tokens that came from the prefix cache; known from the first token on.
        demoted: the request became best effort.
    """

    request_id: str
    time_ns: int
    token_ids: tuple[int, ...] = ()
    payload: Any = None
    outcome: Outcome = Outcome.OPEN
    finish: Finish = Finish.NONE
    reason: Reason = Reason.NONE
    numbers: Mapping[str, float] = field(default_factory=dict)
    retry_after_s: float | None = None
    cached_tokens: int = 0
    demoted: bool = False


Sink = Callable[[Update], None]
"""Receives a request's updates, called on the driver's thread; must not block."""
