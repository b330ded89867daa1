"""BurstGPT traces, CSV. Requests that failed there (no response tokens) are left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kaiseki.work.traces.lines import csv_rows
from kaiseki.work.traces.records import Record

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def records(path: Path) -> Iterator[Record]:
    """The requests of a file that were answered.

    Raises:
        OSError: it can't be read.
        TraceError: it is wrong somewhere.
    """
    for spot, (time, prompt, output) in csv_rows(path, COLUMNS):
        time_ns = spot.time_ns(COLUMNS[0], time, 1.0, "seconds")
        output_tokens = spot.whole_tokens(COLUMNS[2], output, least=0)
        if output_tokens:
            prompt_tokens = spot.whole_tokens(COLUMNS[1], prompt)
            yield Record(spot, time_ns, COLUMNS[0], time, prompt_tokens, output_tokens)
