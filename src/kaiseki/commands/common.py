"""What commands share: `--json [FILE]`, errors without tracebacks, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

OK, FINDING, USAGE = 0, 1, 2
"""Exit codes: all is well; a finding or a failed target; wrong usage or bad input."""

STDOUT = "-"

JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE]", help="Print JSON, or write it to FILE.", show_default=False),
]


class Command(TyperCommand):
    """A command whose `--json` may stand without a file, which Typer alone does not offer."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in the value that a bare `--json` stands for."""
        full: list[str] = []
        for i, arg in enumerate(args):
            full.append(arg)
            last = i + 1 == len(args)
            if arg == "--json" and (last or (args[i + 1].startswith("-") and args[i + 1] != STDOUT)):
                full.append(STDOUT)
        return super().parse_args(ctx, full)


def fail(message: str, code: int = USAGE) -> NoReturn:
    """Say what is wrong on standard error and end."""
    print(f"kaiseki: {message}", file=sys.stderr)
    raise typer.Exit(code)


def write_json(document: Any, target: str) -> None:
    """Write a document where `--json` said."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    if target == STDOUT:
        print(text)
        return
    try:
        Path(target).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {target}: {error.strerror}")
