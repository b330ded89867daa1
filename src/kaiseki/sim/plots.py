"""Figures of the report, as SVG text that stands by itself."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kaiseki.core.decision import F64

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 400
"""Of a distribution's curve; more can't be told apart."""
LOW, HIGH = 0.1, 99.9
"""Percentiles between which a distribution is drawn."""
COLOURS = ("#0f766e", "#b45309", "#6d28d9", "#be123c", "#0369a1", "#4d7c0f", "#57534e", "#a21caf")
"""By policy, told apart on white and by most who do not see all colours."""
STYLES = ("-", "--", "-.", ":")


def attainment(curves: Mapping[str, Sequence[tuple[float, float]]], target: float) -> str:
    """Attainment over the rate of arrivals.

    Args:
        curves: (requests per second, attainment) of each policy, by rate.
        target: where a line is drawn.
    """
    figure, axes = _axes(1, 1, 7.2, 3.4)
    one = axes[0]
    for i, (name, points) in enumerate(curves.items()):
        rates, attained = zip(*points, strict=True)
        one.plot(rates, np.array(attained) * 100, marker="o", markersize=4, label=name, **_style(i))
    one.axhline(target * 100, color="#78716c", linewidth=0.8, linestyle=(0, (1, 2)))
    one.set_xlabel("requests per second")
    one.set_ylabel("attained, %")
    one.set_ylim(0, 102)
    one.legend(frameon=False, fontsize=8)
    return _svg(figure)


def distributions(
    found: Mapping[str, Mapping[str, tuple[F64, F64]]],
    targets: Mapping[str, tuple[float | None, float | None]],
) -> str:
    """How TTFT and gaps are distributed, a row of two plots per class.

    Args:
        found: by class and policy, (TTFT, gaps) in ms.
        targets: by class, the same, None without one.
    """
    figure, axes = _axes(len(found), 2, 9.2, 2.4 * len(found))
    for row, (cls, policies) in enumerate(found.items()):
        for column, what in enumerate(("TTFT", "gap between tokens")):
            one = axes[2 * row + column]
            for i, (name, values) in enumerate(policies.items()):
                if values[column].size:
                    one.plot(*_curve(values[column]), label=name, **_style(i))
            target = targets[cls][column]
            if target is not None:
                one.axvline(target, color="#78716c", linewidth=0.8, linestyle=(0, (1, 2)))
            one.set_xscale("log")
            one.set_title(f"{cls}: {what}", fontsize=9, loc="left")
            one.set_xlabel("ms")
            one.set_ylabel("% below")
    axes[0].legend(frameon=False, fontsize=8)
    return _svg(figure)


def _curve(values: F64) -> tuple[F64, F64]:
    """Values and the part of all, %, that is not above them."""
    percents = np.linspace(LOW, HIGH, POINTS)
    return np.maximum(np.percentile(values, percents), 1e-3), percents


def _style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i // len(COLOURS) % len(STYLES)]}


def _axes(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure without a window behind it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    axes: list[Axes] = list(grid.flat)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25, linewidth=0.6)
        one.tick_params(labelsize=8)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure, from its first tag on; texts stay texts."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kaiseki"}):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
