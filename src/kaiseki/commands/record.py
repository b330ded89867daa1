"""`kaiseki record`: recordings for other tools."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kaiseki.commands.common import STDOUT, Command, JsonFile, fail, write_json

record = typer.Typer(no_args_is_help=True, help="Recordings for other tools.")


class Format(StrEnum):
    """What to write."""

    PARQUET = "parquet"
    PERFETTO = "perfetto"


@record.callback()
def group() -> None:
    """Recordings for other tools."""


@record.command(cls=Command)
def export(
    recording: Annotated[
        Path, typer.Argument(metavar="RECORDING", help="Folder or file of a recording.", show_default=False)
    ],
    to: Annotated[Format, typer.Option(help="What to write.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to.", show_default="beside the recording")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Write requests, slots, chunks, events and cutoffs as Parquet tables, or a picture for ui.perfetto.dev.

    Parquet needs pyarrow.

    Example: kaiseki record export /var/lib/kaiseki --to perfetto --out .
    """
    from kaiseki.observe.recorder.export import to_parquet, to_perfetto
    from kaiseki.observe.recorder.reading import UnreadableRecording, read

    write = {Format.PARQUET: to_parquet, Format.PERFETTO: to_perfetto}[to]
    folder = out or (recording if recording.is_dir() else recording.parent)
    try:
        files = [path for one in read(recording) for path in write(one, folder)]
    except UnreadableRecording as error:
        fail(str(error))
    except ImportError:
        fail("--to parquet needs pyarrow: pip install 'kaiseki[report]'")
    except OSError as error:
        fail(f"{error.filename or recording}: {error.strerror}")
    if json is not None:
        write_json({"files": [str(path) for path in files]}, json)
    if json != STDOUT:
        for path in files:
            typer.echo(path)
