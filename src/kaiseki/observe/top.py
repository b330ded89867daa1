"""The live view in a terminal: the same documents as the dashboard's, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

Documents = Callable[[], AsyncIterator[dict[str, Any]]]
"""Opens the stream of live documents; it may raise OSError or ValueError, with a message for people."""
Explain = Callable[[str], str]
"""What is known of a request, as lines for people; slow, so it runs on a thread."""
BAR = 24


class Story(ModalScreen[None]):
    """Why one request waited."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter", "dismiss", "close")]
    CSS = "Story { align: center middle; } Story VerticalScroll { width: 90%; height: 80%; border: round; }"

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Lines that scroll."""
        with VerticalScroll():
            yield Static(Text(self._text))


class Top(App[str]):
    """Requests in a table, with classes, tenants, queue and KV above it. Ends with a message when it must."""

    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "quit"), ("p", "pause", "pause")]
    CSS = """
    #head { height: 1; padding: 0 1; text-style: bold; }
    #panels { height: auto; max-height: 12; }
    #panels Static { width: 1fr; padding: 0 1; }
    DataTable { height: 1fr; }
    """
    COLUMNS = ("request", "tenant", "class", "state", "prompt", "done", "out", "age s", "why it waits")

    def __init__(self, documents: Documents, explain: Explain) -> None:
        super().__init__()
        self._documents, self._explain = documents, explain
        self._tokens: Counter[str] = Counter()
        self._held = False

    def compose(self) -> ComposeResult:
        """One line, three panels, one table."""
        yield Static(id="head")
        with Horizontal(id="panels"):
            yield Static(id="classes")
            yield Static(id="tenants")
            yield Static(id="queue")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        table = self.query_one(DataTable)
        for name in self.COLUMNS:
            table.add_column(name, key=name)
        self.run_worker(self._read(), exclusive=True)

    def action_pause(self) -> None:
        """Hold the picture still, or go on."""
        self._held = not self._held

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Explain the chosen request."""
        name = str(event.row_key.value)
        worker = self.run_worker(lambda: self._explain(name), thread=True, exit_on_error=False)
        self.push_screen(Story(await worker.wait()))

    async def _read(self) -> None:
        try:
            async for document in self._documents():
                self._tokens.update(document["tokens"])
                if not self._held:
                    self.show(document)
        except (OSError, ValueError) as error:
            self.exit(str(error), return_code=2)
            return
        self.exit("the server has ended the stream")

    def show(self, document: dict[str, Any]) -> None:
        """Draw one document."""
        kv = document["kv"]
        used = 1 - kv["free_blocks"] / kv["total_blocks"]
        health = document["health"]
        state = "" if health["ok"] else f"  NOT OK: {health['reason']}"
        waiting = sum(q["waiting"] for q in document["queue"])
        self._put(
            "head",
            f"slot {document['slot']}  policy {document['policy']}  running {document.get('running', '-')}"
            f"  waiting {waiting}  KV {used:.0%} of {kv['total_blocks']} blocks{state}",
        )
        self._put("classes", _classes(document["attainment"]))
        self._put("tenants", _tenants(self._tokens, document["tenants"]))
        self._put("queue", _queue(document["queue"]))
        self._fill(document["requests"])

    def _put(self, name: str, content: str | Table) -> None:
        self.query_one(f"#{name}", Static).update(Text(content) if isinstance(content, str) else content)

    def _fill(self, requests: list[dict[str, Any]]) -> None:
        """Rows that stay keep their place, and the cursor with them."""
        table = self.query_one(DataTable)
        wanted = {r["request"]: _row(r) for r in requests}
        for key in [key for key in table.rows if key.value not in wanted]:
            table.remove_row(key)
        known = {key.value for key in table.rows}
        for name, cells in wanted.items():
            if name not in known:
                table.add_row(*cells, key=name)
                continue
            for column, cell in zip(self.COLUMNS, cells, strict=True):
                if table.get_cell(name, column) != cell:
                    table.update_cell(name, column, cell)


def _row(r: dict[str, Any]) -> tuple[str, ...]:
    done = min(1.0, r["computed_tokens"] / max(1, r["prompt_tokens"]))
    state = f"{r['state']}, best effort" if r["demoted"] else r["state"]
    why = (r["reason"] or "").replace("_", " ")
    numbers = (str(r["prompt_tokens"]), f"{done:.0%}", str(r["output_tokens"]), f"{r['age_ms'] / 1e3:.1f}")
    return (r["request"][:12], r["tenant"], r["class"], state, *numbers, why)


def _panel(title: str, rows: list[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 1))
    for row in rows or [("-", "", "")]:
        table.add_row(*map(Text, row))
    return table


def _bar(share: float) -> str:
    return "█" * round(share * BAR) + "·" * (BAR - round(share * BAR))


def _classes(counted: list[dict[str, Any]]) -> Table:
    good: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for c in counted:
        good[c["class"]] += c["attained"]
        ended[c["class"]] += c["attained"] + c["missed"]
    rows = [(name, _bar(good[name] / n), f"{good[name] / n:.0%} of {n}") for name, n in ended.items() if n]
    return _panel("attained, by class", rows)


def _tenants(tokens: Counter[str], tenants: dict[str, Any]) -> Table:
    weights = {name: tenants[name]["weight"] for name in tokens if name in tenants}
    total, weight = sum(tokens.values()) or 1, sum(weights.values()) or 1.0
    rows = [
        (name, _bar(count / total), f"{count / total:.0%}, weight {weights.get(name, 0) / weight:.0%}")
        for name, count in tokens.most_common(8)
    ]
    return _panel("tokens, by tenant", rows)


def _queue(queue: list[dict[str, Any]]) -> Table:
    reasons: Counter[str] = Counter()
    for q in queue:
        reasons[q["reason"]] += q["waiting"]
    total = sum(reasons.values()) or 1
    rows = [(name.replace("_", " "), _bar(n / total), str(n)) for name, n in reasons.most_common(8)]
    return _panel("waiting, by reason", rows)
