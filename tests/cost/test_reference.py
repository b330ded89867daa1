"""The roofline against measured iterations: within 20 % everywhere."""

from __future__ import annotations

import pytest
from benchmarks.cost_model import fit_host, halves, layer_ms, system_ms
from tests.cost.reference import KERNELS, SMALL, SYSTEM, Point

from kaiseki.cost.deployment import HostTime

TOLERANCE = 0.20


def off(point: Point, modelled_ms: float) -> float:
    return abs(modelled_ms / point.measured_ms - 1)


@pytest.mark.parametrize("point", KERNELS, ids=lambda p: p.label)
def test_kernels_of_the_large_model(point: Point) -> None:
    assert off(point, layer_ms(point, small=False)) < TOLERANCE


@pytest.mark.parametrize("point", SMALL, ids=lambda p: p.label)
def test_kernels_of_the_small_model(point: Point) -> None:
    assert off(point, layer_ms(point, small=True)) < TOLERANCE


@pytest.mark.parametrize("fitted,tested", halves(), ids=["even points fitted", "odd points fitted"])
def test_a_host_fitted_to_half_of_the_points_predicts_the_others(
    fitted: list[Point], tested: list[Point]
) -> None:
    assert not set(fitted) & set(tested) and len(fitted) + len(tested) == len(SYSTEM)
    host = fit_host(fitted)
    errors = {p.label: off(p, system_ms(p, host)) for p in tested}
    assert max(errors.values()) < TOLERANCE, errors


def test_without_a_host_term_the_system_is_not_explained() -> None:
    assert max(off(p, system_ms(p, HostTime())) for p in SYSTEM) > 2 * TOLERANCE
