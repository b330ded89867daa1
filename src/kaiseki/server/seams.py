"""What the server needs from the rest: a driver that runs requests, and a model's text side.

Protocols, so that the server can be tested without a model and knows nothing of the engine's insides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kaiseki.core.requests import Request
from kaiseki.engines.updates import Sink
from kaiseki.observe.metrics import Bins
from kaiseki.observe.recorder.reading import Recording

Backlog = Callable[[], tuple[int, int]]
"""How many requests wait in the scheduler, and their prompt tokens."""


class HealthLike(Protocol):
    """How the driver is."""

    @property
    def ok(self) -> bool:
        """Whether requests make progress."""
        ...

    @property
    def reason(self) -> str:
        """Why not, for people; empty when all is well."""
        ...

    @property
    def code(self) -> str:
        """Why not, for machines: `no_progress` or `engine_failing`."""
        ...

    @property
    def retry_after_s(self) -> float | None:
        """When trying again makes sense, where it may pass by itself."""
        ...


class DriverLike(Protocol):
    """Runs requests. Everything may be called from any thread; `submit` and `cancel` return at once."""

    @property
    def metrics(self) -> Bins:
        """Where it counts."""
        ...

    def submit(self, request: Request, work: object, sink: Sink) -> None:
        """Queue a request; all news of it, a refusal too, go to the sink."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request if it is still open."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones; False when some were still open at the end."""
        ...

    def health(self) -> HealthLike:
        """Whether progress is made."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """The state document."""
        ...

    def live(self, since: int, tenant: str | None) -> dict[str, Any]:
        """What ran after slot `since` and how things stand, of one tenant or of all."""
        ...

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """The explain document of an open or recent request."""
        ...

    def recording(self) -> Recording | None:
        """A copy of the flight recorder's ring, None when nothing is recorded."""
        ...

    def recent(self, limit: int, tenant: str | None) -> list[dict[str, Any]]:
        """Open and recently ended requests, newest first."""
        ...


class TextModel(Protocol):
    """Text to token ids; output comes back as text from the engine."""

    @property
    def name(self) -> str:
        """What clients call the model."""
        ...

    @property
    def max_context(self) -> int:
        """Longest prompt + output, tokens."""
        ...

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt + output that fits the KV pool too; a missing `max_tokens` is derived from it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins.

        Raises:
            ValueError: the model has no chat template, or it refuses these messages.
        """
        ...

    def block_hashes(self, prompt_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Chained digests of the prompt's full KV blocks."""
        ...
