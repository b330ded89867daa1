"""Lines and CSV rows of a file, one at a time and of limited length."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from kaiseki.work.traces.errors import Spot

MAX_LINE_BYTES = 16 << 20
"""The prefix ids of a prompt of `MAX_TOKENS` take a hundredth of this."""


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and lines without their end, blank ones left out.

    Raises:
        OSError: the file can't be read.
        TraceError: a line is too long or not UTF-8.
    """
    with path.open("rb") as file:
        number = 0
        while data := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(data) == MAX_LINE_BYTES:
                allowed = f"lines of less than {MAX_LINE_BYTES} bytes"
                raise Spot(str(path), number).error("line", f"more than {MAX_LINE_BYTES} bytes", allowed)
            try:
                text = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                shown = data[error.start : error.start + 20]
                raise Spot(str(path), number).error("text", shown, "UTF-8") from None
            if text := text.strip():
                yield number, text


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[Spot, list[str]]]:
    """The values of the named columns of each row after the header; other columns are ignored.

    Raises:
        OSError: the file can't be read.
        TraceError: there is no header with these columns, or a row is too short.
    """
    numbered = lines(path)
    _, header = next(numbered, (1, ""))
    names = _cells(Spot(str(path), 1), header)
    missing = [column for column in columns if column not in names]
    if missing:
        raise Spot(str(path), 1).error("header", header, f"the columns {', '.join(columns)}")
    places = [names.index(column) for column in columns]
    for number, line in numbered:
        spot = Spot(str(path), number)
        cells = _cells(spot, line)
        if len(cells) != len(names):
            raise spot.error("row", line, f"{len(names)} values, as the header has")
        yield spot, [cells[place] for place in places]


def _cells(spot: Spot, line: str) -> list[str]:
    if '"' not in line:
        return [cell.strip() for cell in line.split(",")]
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise spot.error("row", line, f"comma-separated values ({error})") from None
