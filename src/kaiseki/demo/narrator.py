"""Tells a person what is being done and how long it should take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.text import Text


class _TimeBar(BarColumn):
    """A bar that fills with time, so that nothing has to move it."""

    def render(self, task: Task) -> ProgressBar:
        """See `BarColumn`."""
        total = task.total or 1.0
        return ProgressBar(total=total, completed=min(task.elapsed or 0.0, total), width=30)


class Narrator:
    """Writes to a console: a bar per step on a terminal, a line per step elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(Text(text), soft_wrap=True)

    @contextmanager
    def step(self, text: str, seconds: float) -> Iterator[None]:
        """A step that is expected to take so many seconds."""
        if not self.console.is_terminal:
            self.say(f"{text} (about {seconds:.0f} s)")
            yield
            return
        columns = (TextColumn("{task.description}", markup=False), _TimeBar(), TimeElapsedColumn())
        shown = f"{text} (about {seconds:.0f} s)"
        with Progress(*columns, console=self.console, transient=True, refresh_per_second=2) as bars:
            bars.add_task(shown, total=seconds)
            yield
        self.say(f"{text}: done")
