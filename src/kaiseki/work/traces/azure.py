"""Azure LLM inference traces (2023: Splitwise, ISCA'24; 2024: the same columns), CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kaiseki.work.traces.errors import Spot
from kaiseki.work.traces.lines import csv_rows
from kaiseki.work.traces.records import Record

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def records(path: Path) -> Iterator[Record]:
    """The requests of a file.

    Raises:
        OSError: it can't be read.
        TraceError: it is wrong somewhere.
    """
    for spot, (time, prompt, output) in csv_rows(path, COLUMNS):
        yield Record(
            spot,
            _time_ns(spot, time),
            COLUMNS[0],
            time,
            spot.whole_tokens(COLUMNS[1], prompt),
            spot.whole_tokens(COLUMNS[2], output),
        )


def _time_ns(spot: Spot, text: str) -> int:
    """Since 1970; a time without an offset is UTC, and fractions may have up to nine digits."""
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        seconds, fraction, offset = match.groups()
        whole = datetime.fromisoformat(seconds + (offset or "Z")) - _EPOCH
    except ValueError:
        allowed = "YYYY-MM-DD HH:MM:SS with up to nine digits of fraction"
        raise spot.error(COLUMNS[0], text, allowed) from None
    return (whole.days * 86_400 + whole.seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))
