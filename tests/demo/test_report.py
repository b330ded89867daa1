"""The document: medians, the best budget, verdicts, and how it is shown."""

from __future__ import annotations

import pytest
from rich.console import Console

from kaiseki.demo.prompts import BATCH, INTERACTIVE
from kaiseki.demo.report import best_budget, median_of, verdicts
from kaiseki.demo.tables import PLAIN_WIDTH, comparison, explained_lines, show


def figures(interactive: float, attained: int, rate: float) -> dict:
    none = dict.fromkeys(("p50", "p90", "p99", "mean", "max"))
    cls = {"requests": 10, "attained": 5, "ttft_ms": none, "tbt_ms": none, "attainment": interactive}
    return {
        "requests": 20,
        "attained": attained,
        "attainment": attained / 20,
        "output_tokens_per_s": rate,
        "budget_tokens": 64,
        "classes": {INTERACTIVE: cls, BATCH: cls | {"attainment": None}},
    }


def test_medians_of_documents():
    one, two, three = (
        {"a": {"b": value}, "c": None, "d": d} for value, d in ((1, None), (5, None), (3, 2.0))
    )
    assert median_of([one, two, three]) == {"a": {"b": 3.0}, "c": None, "d": 2.0}
    assert median_of([one]) == one


def test_the_best_budget_attains_most():
    runs = {64: [{"attainment": 0.5}, {"attainment": 0.9}], 128: [{"attainment": 0.75}] * 2}
    assert best_budget(runs) == 128


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (figures(0.96, 15, 99.0), [True, True, True, True]),
        (figures(0.94, 14, 94.0), [False, True, False, False]),
        (figures(0.79, 15, 110.0), [False, False, True, True]),
    ],
)
def test_verdicts(ours, expected):
    policies = {"fcfs": figures(0.6, 9, 90.0), "priority": figures(0.9, 14, 100.0), "kaiseki": ours}
    assert [check["ok"] for check in verdicts(policies)] == expected


def test_the_table_fits_a_plain_page():
    console = Console(width=PLAIN_WIDTH, record=True)
    console.print(comparison({"policies": {"fcfs": figures(0.6, 9, 90.0)}}))
    text = console.export_text()
    assert "fcfs, 64" in text
    assert "60.0%" in text
    assert "…" not in text


def test_all_budgets_that_were_tried_are_shown():
    tried = [{"budget_tokens": b, "attained": b, "attainment": b / 1024} for b in (64, 512)]
    load = dict.fromkeys(
        ("requests", "seconds", "offered_ratio", "sustainable_rps", "interactive_share"), 0.4
    )
    fcfs = figures(0.6, 9, 90.0) | {"budgets": tried}
    console = Console(width=PLAIN_WIDTH, record=True)
    show({"load": load, "policies": {"fcfs": fcfs}, "verdicts": [], "explained": None}, console)
    assert "fcfs, attained by budget: 64: 6.2%, 512: 50.0%" in console.export_text()


def test_an_explanation_in_a_few_lines():
    waits = [{"ms": float(i), "detail": f"reason {i}"} for i in range(5)]
    lines = explained_lines({"summary": "it waited", "waits": waits, "counterfactuals": ["more room"]})
    assert lines[0] == "explained: it waited"
    assert len(lines) == 5
