"""Emission times for clients that measure: a request with `x-kaiseki-timing: 1` gets them in its stream.

Each chunk that carries tokens then has a `kaiseki` object: `t_ms`, when the engine's step that made them
had ended; `arrival_ms`, when the request reached the server, on the same clock; `tokens`, how many; and
`demoted`, whether the request had become best effort when it ended. Chunks whose tokens add no text yet
are sent too, so that no gap between tokens is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kaiseki.server.generation import Piece

TIMING_HEADER = "x-kaiseki-timing"


class Stamps:
    """Makes the `kaiseki` object of a stream's chunks, if its client asked for it."""

    def __init__(self, headers: Mapping[str, str], arrival_ns: int) -> None:
        self._wanted = headers.get(TIMING_HEADER, "").strip() == "1"
        self._arrival_ms = arrival_ns / 1e6

    def of(self, piece: Piece) -> dict[str, Any]:
        """What to add to the chunk of a piece; nothing when it has no tokens or no times are wanted."""
        if not self._wanted or not piece.tokens:
            return {}
        return {
            "kaiseki": {
                "t_ms": piece.time_ns / 1e6,
                "arrival_ms": self._arrival_ms,
                "tokens": len(piece.tokens),
                "demoted": piece.demoted,
            }
        }
