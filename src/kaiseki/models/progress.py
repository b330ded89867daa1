"""Telling a person how far a long step has come: bars on a terminal, one line per step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, units done, units in all); 0 in all means not known."""


def quiet(step: str, done: int, total: int) -> None:
    """A `Progress` that says nothing."""


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """A `Progress` that writes to standard error: a bar if that is a terminal, else a line per step."""
    if not sys.stderr.isatty():
        yield _one_line_per_step()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=None)

        def show(step: str, done: int, total: int) -> None:
            bars.update(task, description=step, completed=done, total=total or None)

        yield show


def _one_line_per_step() -> Progress:
    last = ""

    def show(step: str, done: int, total: int) -> None:
        nonlocal last
        if step != last:
            print(step, file=sys.stderr, flush=True)
            last = step

    return show
