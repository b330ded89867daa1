"""From the requests of a trace, one by one, to batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kaiseki.work.batches import BATCH_ROWS, Batch, Blocks
from kaiseki.work.traces.errors import Spot


class Record(NamedTuple):
    """One request of a trace; `block_ids` is empty where the trace has none."""

    spot: Spot
    time_ns: int
    time_field: str
    time_shown: str
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int] = ()


def batches(path: Path, records: Iterable[Record]) -> Iterator[Batch]:
    """Batches of `BATCH_ROWS` requests; times count from the first request.

    Raises:
        TraceError: a time is before the one of the line above, or there is no request at all.
    """
    ordered = _in_order(path, records)
    first = 0
    start_ns: int | None = None
    while rows := list(islice(ordered, BATCH_ROWS)):
        start_ns = rows[0].time_ns if start_ns is None else start_ns
        yield Batch.of(
            first,
            [row.time_ns - start_ns for row in rows],
            [row.prompt_tokens for row in rows],
            [row.output_tokens for row in rows],
            blocks=Blocks.of([row.block_ids for row in rows]),
        )
        first += len(rows)


def _in_order(path: Path, records: Iterable[Record]) -> Iterator[Record]:
    before: Record | None = None
    for record in records:
        if before is not None and record.time_ns < before.time_ns:
            allowed = (
                f"times in ascending order, so not before {before.time_shown} of line {before.spot.line}"
            )
            raise record.spot.error(record.time_field, record.time_shown, allowed)
        yield record
        before = record
    if before is None:
        raise Spot(str(path), 1).error("file", "no requests", "at least one request")
