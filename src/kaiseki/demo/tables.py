"""The document of a demonstration, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

COLUMNS = ("policy", "class", "attained", "", "TTFT ms p50 / 90 / 99", "gap ms p50 / 99", "tokens/s")
PLAIN_WIDTH = 110
"""Where there is no terminal to ask."""
TOP_WAITS = 3


def show(document: Mapping[str, Any], console: Console) -> None:
    """The comparison, the verdicts, and one explained request."""
    load = document["load"]
    offered = (
        f"\n{load['requests']:.0f} requests in {load['seconds']:.0f} s, {load['offered_ratio']:.2f} times "
        f"what fcfs sustains ({load['sustainable_rps']:.2f}/s); "
        f"interactive: {load['interactive_share']:.0%} of the work"
    )
    console.print(Text(offered), soft_wrap=True)
    console.print(comparison(document))
    for policy, figures in document["policies"].items():
        if "budgets" in figures:
            tried = (f"{run['budget_tokens']}: {run['attainment']:.1%}" for run in figures["budgets"])
            console.print(Text(f"{policy}, attained by budget: {', '.join(tried)}"), soft_wrap=True)
    for check in document["verdicts"]:
        console.print(_verdict(check), soft_wrap=True)
    if document["explained"] is not None:
        console.print(Text("\n" + "\n".join(explained_lines(document["explained"]))), soft_wrap=True)


def comparison(document: Mapping[str, Any]) -> Table:
    """One row per policy and class, and one for each policy as a whole."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for policy, figures in document["policies"].items():
        budget = figures["budget_tokens"]
        name = policy if budget is None else f"{policy}, {budget}"
        for cls, of_class in figures["classes"].items():
            ttft, gaps = of_class["ttft_ms"], of_class["tbt_ms"]
            table.add_row(
                name,
                cls,
                *_met(of_class),
                _join(ttft[p] for p in ("p50", "p90", "p99")),
                _join(gaps[p] for p in ("p50", "p99")),
            )
            name = ""
        rate = f"{figures['output_tokens_per_s']:.1f}"
        table.add_row("", "all", *_met(figures), "", "", rate, end_section=True, style="bold")
    return table


def explained_lines(document: Mapping[str, Any]) -> list[str]:
    """An explain document in a few lines."""
    lines = [f"explained: {document['summary']}"]
    lines += [f"  {wait['ms']:8.0f} ms  {wait['detail']}" for wait in document.get("waits", ())[:TOP_WAITS]]
    lines += [f"  {told}" for told in document.get("counterfactuals", ())[:1]]
    return lines


def _verdict(check: Mapping[str, Any]) -> Text:
    shown = "ok    " if check["ok"] else "missed"
    text = Text(shown, style="green" if check["ok"] else "red")
    return text.append(
        f"  {check['target']}: {check['reached']:.3g}, wanted {check['wanted']:.3g}", style="default"
    )


def _met(figures: Mapping[str, Any]) -> tuple[str, str]:
    share = figures["attainment"]
    counted = f"{figures['attained']:g} of {figures['requests']:g}"
    return counted, "-" if share is None else f"{share:.1%}"


def _join(values: Iterable[float | None]) -> str:
    return " / ".join("-" if value is None else f"{value:.0f}" for value in values)
