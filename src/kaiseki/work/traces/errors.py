"""What is wrong with a trace, said so that the line can be found and put right."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

from kaiseki.work.batches import MAX_TOKENS

MAX_TIME_S = 100 * 366 * 86_400
"""No trace spans more than a century; more is a wrong unit."""
SHOWN_CHARACTERS = 80


class TraceError(ValueError):
    """A trace that cannot be used.

    Attributes:
        file: the file as it was named.
        line: line number from 1.
        field: column or key.
        value: what was found there, shortened.
        allowed: what may be there.
    """

    def __init__(self, file: str, line: int, field: str, value: Any, allowed: str) -> None:
        text = value if isinstance(value, str) else repr(value)
        shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
        super().__init__(f"{file}, line {line}: {field}: found {shown!r}; allowed: {allowed}")
        self.file = file
        self.line = line
        self.field = field
        self.value = shown
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of a trace, to read its values from."""

    file: str
    line: int

    def error(self, field: str, value: Any, allowed: str) -> TraceError:
        """What to raise for a value of this line."""
        return TraceError(self.file, self.line, field, value, allowed)

    def whole_tokens(self, field: str, value: Any, least: int = 1) -> int:
        """A number of tokens from JSON (an int) or CSV (decimal digits).

        Raises:
            TraceError: it is no whole number from `least` to `MAX_TOKENS`.
        """
        if isinstance(value, str) and len(value) <= 20 and value.isascii() and value.strip().isdigit():
            value = int(value)
        if type(value) is int and least <= value <= MAX_TOKENS:
            return value
        raise self.error(field, value, f"a whole number from {least} to {MAX_TOKENS}")

    def time_ns(self, field: str, value: Any, unit_s: float, unit: str) -> int:
        """A time from JSON or CSV as nanoseconds.

        Args:
            field: column or key.
            value: a number or its digits.
            unit_s: seconds per unit.
            unit: name of the unit, for the message.

        Raises:
            TraceError: it is no finite number >= 0 or more than a century.
        """
        number: float | int = math.nan
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                number = float(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = value
        if 0 <= number <= MAX_TIME_S / unit_s:
            return round(number * (unit_s * 1e9))
        raise self.error(field, value, f"a time in {unit} from 0, at most a century")
