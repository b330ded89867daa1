"""How explanations look: a summary, facts, tables and remarks, drawn at a terminal and plain elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import typer


@dataclass(frozen=True, slots=True)
class Table:
    """Headings, and rows of cells."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(slots=True)
class Page:
    """What is shown."""

    summary: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def show(page: Page) -> None:
    """Print it."""
    if sys.stdout.isatty():
        _draw(page)
    else:
        typer.echo("\n".join(lines_of(page)))


def page_of_request(document: dict[str, Any]) -> Page:
    """A request's life."""
    names = ("request", "tenant", "class", "outcome")
    facts = [(name, str(document[name])) for name in names if name in document]
    if document.get("total_wait_ms") is not None:
        facts.append(("waited", f"{document['total_wait_ms']:.1f} ms"))
    timeline = [_event(entry) for entry in document.get("timeline", ())]
    tables = [Table("timeline", ("slot", "ms", "event", "reason", "detail"), timeline)]
    if document.get("waits"):
        waits = [_wait(wait) for wait in document["waits"]]
        tables.append(Table("waits", ("waited ms", "reason", "yielded to"), waits))
    remarks = [_sentence(item) for item in document.get("counterfactuals", ())]
    return Page(str(document.get("summary", "")), facts, tables, remarks)


def page_of_slot(document: dict[str, Any]) -> Page:
    """One slot."""
    blocks = document["kv_blocks"]
    facts = [
        ("running", str(document["running"])),
        ("waiting", str(document["waiting"])),
        ("KV blocks", f"{blocks['free']} of {blocks['total']} free"),
    ]
    chunks = [
        (
            _cell(c["request"]),
            _cell(c["tenant"]),
            _cell(c["class"]),
            _cell(c["kind"]),
            str(c["tokens"]),
            str(c["start"]),
        )
        for c in document["chunks"]
    ]
    tables = [Table("batch", ("request", "tenant", "class", "kind", "tokens", "from position"), chunks)]
    if document["touched"]:
        touched = [(_cell(e["request"]), e["event"], e["reason"], e["detail"]) for e in document["touched"]]
        tables.append(Table("looked at", ("request", "event", "reason", "detail"), touched))
    if document["cutoffs"]:
        cuts = [
            (_cell(c["tenant"]), str(c["since_slot"]), c["reason"], c["detail"]) for c in document["cutoffs"]
        ]
        tables.append(Table("where queues were cut", ("tenant", "since slot", "reason", "detail"), cuts))
    return Page(document["summary"], facts, tables)


def page_of_tenant(document: dict[str, Any]) -> Page:
    """Who got what."""
    facts = [("from", document["from"]), ("to", document["to"]), ("slots", str(document["slots"]))]
    facts.append(("card busy", f"{document['card_ms']:.0f} ms"))
    shares = [
        (
            s["tenant"], f"{s['card_ms']:.0f}", "" if s["share"] is None else f"{s['share']:.1%}",
            f"{s['entitled']:.1%}", str(s["requests"]), str(s["prompt_tokens"]), str(s["output_tokens"]),
        )
        for s in document["shares"]
    ]  # fmt: skip
    headings = ("tenant", "card ms", "share", "by weight", "requests", "prompt tokens", "output tokens")
    tables = [Table("card time", headings, shares)]
    if document["waits"]:
        waits = [_wait(wait) for wait in document["waits"]]
        tables.append(Table(f"why {document['tenant']} waited", ("waited ms", "reason", "yielded to"), waits))
    return Page(document["summary"], facts, tables)


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _wait(wait: dict[str, Any]) -> tuple[str, str, str]:
    yielded = wait.get("yielded_to") or ()
    yielded = yielded if isinstance(yielded, list | tuple) else [yielded]
    return f"{wait.get('ms') or 0:.1f}", str(wait.get("reason", "")), ", ".join(map(str, yielded))


def _event(entry: dict[str, Any]) -> tuple[str, str, str, str, str]:
    slot, event, reason, detail = (_cell(entry.get(name)) for name in ("slot", "event", "reason", "detail"))
    return slot, f"{entry.get('t_ms') or 0:.1f}", event, reason, detail


def _sentence(item: Any) -> str:
    if isinstance(item, dict):
        return str(item.get("text") or ", ".join(f"{name}: {value}" for name, value in item.items()))
    return str(item)


def lines_of(page: Page) -> list[str]:
    """For files and pipes."""
    lines = [page.summary, "", *(f"{name}: {value}" for name, value in page.facts)]
    for table in page.tables:
        lines += ["", "\t".join(table.headings), *("\t".join(row) for row in table.rows)]
    if page.remarks:
        lines += ["", "what would have changed it:", *(f"- {remark}" for remark in page.remarks)]
    return lines


def _draw(page: Page) -> None:
    """For people at a terminal."""
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    console = Console()
    console.print(Text(page.summary, style="bold"))
    console.print(Text("  ".join(f"{name}: {value}" for name, value in page.facts), style="dim"))
    for table in page.tables:
        drawn = Drawn(*table.headings, title=table.title, title_justify="left")
        for row in table.rows:
            drawn.add_row(*map(Text, row))
        console.print(drawn)
    for remark in page.remarks:
        console.print(Text(f"• {remark}"))
