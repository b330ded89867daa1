"""Hold the roofline against measured iteration times, and fit what it has to know of cards and hosts.

    python -m benchmarks.cost_model [--fit]

Prints the tables of docs/cost-model.md. With `--fit`, the efficiencies that are in the cards' files are
fitted anew, to the kernel times of Llama-2-70B and Llama-3-8B except the disputed ones, and printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
from scipy.optimize import least_squares
from tests.cost.reference import DISPUTED, KERNELS, SMALL, SYSTEM, Point

from kaiseki.core.decision import F64
from kaiseki.cost.cards import Card, load_card
from kaiseki.cost.deployment import Deployment, HostTime
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.roofline import Roofline

LARGE_MODEL, SMALL_MODEL = load_model("llama-2-70b"), load_model("llama-3-8b")
CARDS = {name: load_card(name) for name in ("a100-80", "h100")}
PER_CARD = ("gemm_compute", "gemm_memory", "link")
SHARED = ("attention_compute", "attention_memory", "elementwise_memory", "serial", "kernel_us")
PRIOR = np.array([0.75, 0.75, 0.7, 0.75, 0.75, 0.9, 0.45, 0.5, 0.7, 0.3, 5.0])
"""Efficiencies of either card, then the shared ones: usual shares. Those of the links, nearly fixed, are
what nccl-tests reach for large all-reduces, with the switches' own reduction on H100."""
PRIOR_SPREAD = np.array([0.5, 0.5, 0.1, 0.5, 0.5, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5])
MEASURED_SPREAD = 0.07
HOST_SCALE = np.array([2e3, 1e3, 10.0, 200.0, 10.0])
"""Typical sizes of the host's times, where their fit starts: those of `HostTime`, in its order."""


def layer_ms(point: Point, small: bool, cards: dict[str, Card] = CARDS) -> float:
    """The kernels that the kernel tables count: those of the layers; of the small model without attention."""
    model = SMALL_MODEL if small else LARGE_MODEL
    times = Roofline(Deployment(model, cards[point.card], tp=point.tp)).kernel_ns(point.features)
    counted = (t for name, t in times.items() if name.startswith(("attention.", "dense.")))
    left_out = sum(t for name, t in times.items() if small and name.endswith("_attention"))
    return (sum(counted) - left_out) / 1e6


def system_ms(point: Point, host: HostTime) -> float:
    """A whole iteration of the large model."""
    deployment = Deployment(LARGE_MODEL, CARDS[point.card], tp=point.tp, host=host)
    return Roofline(deployment).iteration_ns(point.features) / 1e6


def fit_host(points: Sequence[Point]) -> HostTime:
    """The host's times by least squares on the log of modelled / measured; the kernels stay as they are."""
    measured = np.array([p.measured_ms for p in points])
    cards_only = np.array([system_ms(p, HostTime()) for p in points])
    zero, unit = HostTime(), np.eye(len(HOST_SCALE)) * HOST_SCALE
    added = np.array([[system_ms(p, HostTime(*row)) for row in unit] for p in points]) - cards_only[:, None]

    def error(x: F64) -> F64:
        return np.log((cards_only + added @ x) / measured)

    found = least_squares(error, np.ones(len(HOST_SCALE)), bounds=(0, np.inf)).x * HOST_SCALE
    return replace(zero, **dict(zip(HostTime.__slots__, found.tolist(), strict=True)))


def halves() -> list[tuple[list[Point], list[Point]]]:
    """(fitted on, tested on): every second point of the system table and the others, and swapped."""
    return [(SYSTEM[::2], SYSTEM[1::2]), (SYSTEM[1::2], SYSTEM[::2])]


def fit_efficiencies() -> dict[str, Card]:
    """The two cards with their efficiencies fitted to the kernel tables."""
    points = [p for p in KERNELS if p not in DISPUTED]

    def error(x: F64) -> F64:
        cards = _with_efficiencies(x)
        logs = [np.log(layer_ms(p, False, cards) / p.measured_ms) for p in points]
        logs += [np.log(layer_ms(p, True, cards) / p.measured_ms) for p in SMALL]
        return np.concatenate([np.array(logs) / MEASURED_SPREAD, (x / PRIOR - 1) / PRIOR_SPREAD])

    most = np.append(np.ones(len(PRIOR) - 1), 20.0)
    return _with_efficiencies(least_squares(error, PRIOR, bounds=(0.01, most)).x)


def _with_efficiencies(x: F64) -> dict[str, Card]:
    n = len(PER_CARD)
    shared = dict(zip(SHARED, x[2 * n :].tolist(), strict=True))
    cards = {}
    for i, (name, card) in enumerate(CARDS.items()):
        own = dict(zip(PER_CARD, x[i * n : (i + 1) * n].tolist(), strict=True))
        efficiency = card.efficiency.model_copy(update={**own, **shared})
        cards[name] = card.model_copy(update={"efficiency": efficiency})
    return cards


def show(title: str, rows: Sequence[tuple[Point, float]]) -> None:
    """Print modelled beside measured."""
    errors = [ms / p.measured_ms - 1 for p, ms in rows]
    print(f"\n{title}: largest error {max(map(abs, errors)):.1%}, mean {np.mean(np.abs(errors)):.1%}\n")
    print("| point | measured ms | modelled ms | error |\n|---|---|---|---|")
    for (p, ms), error in zip(rows, errors, strict=True):
        disputed = ", disputed" if p in DISPUTED else ""
        print(f"| {p.label}{disputed} | {p.measured_ms:.1f} | {ms:.1f} | {error:+.1%} |")


def main() -> None:
    if "--fit" in sys.argv[1:]:
        for name, card in fit_efficiencies().items():
            print(name, {k: round(v, 2) for k, v in card.efficiency.model_dump().items()})
        return
    show("Kernels, Llama-2-70B", [(p, layer_ms(p, False)) for p in KERNELS])
    show("Kernels but attention, Llama-3-8B", [(p, layer_ms(p, True)) for p in SMALL])
    for fitted, tested in halves():
        host = fit_host(fitted)
        print("\n", host, sep="")
        show("System, points not fitted", [(p, system_ms(p, host)) for p in tested])
    host = fit_host(SYSTEM)
    print("\nAll points fitted:", [float(f"{v:.3g}") for v in astuple(host)])
    show("System, all points fitted", [(p, system_ms(p, host)) for p in SYSTEM])


if __name__ == "__main__":
    main()
