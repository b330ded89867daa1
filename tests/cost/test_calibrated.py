"""Profiles from measured steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kaiseki.core.decision import F64
from kaiseki.core.protocols import F_DECODES, F_SLOT, N_FEATURES
from kaiseki.cost.calibrated import Calibrated, Profile, calibrate
from kaiseki.cost.cards import load_card
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.features import chunk_features
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.profiled import Profiled, Spread
from kaiseki.cost.roofline import Roofline

LINEAR = np.array([20e6, 0.1e6, 1e6, 0.1e6, 50.0, 2.0, 10.0])


def steps(n: int, seed: int = 0) -> F64:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        decodes = rng.integers(1, 8000, int(rng.integers(1, 64)))
        length = int(rng.integers(1, 2048)) if rng.random() < 0.6 else 0
        starts, lengths = ([int(rng.integers(0, 4000))], [length]) if length else ([], [])
        made.append(chunk_features(decodes, starts, lengths))
    return np.array(made)


def test_a_linear_machine_is_found_again() -> None:
    x = steps(200)
    profile = calibrate(x, x @ LINEAR, "test")
    fresh = steps(50, seed=1)
    model = Calibrated(profile)
    for features in fresh:
        assert model.iteration_ns(features) == pytest.approx(features @ LINEAR, rel=1e-3)
    assert profile.fit_error.max < 1e-3 and profile.samples == 200


def test_a_roofline_is_found_with_its_bend() -> None:
    truth = Roofline(Deployment(load_model("llama-3-8b"), load_card("h100")))
    x = steps(400)
    profile = calibrate(x, truth.iterations_ns(x), "test")
    assert profile.bends and profile.fit_error.p90 < 0.05
    linear_only = profile.model_copy(update={"bends": ()})
    f = chunk_features([100])
    assert Calibrated(linear_only).iteration_ns(f) < Calibrated(profile).iteration_ns(f)


def test_noise_shows_in_error_and_headroom() -> None:
    x, rng = steps(300), np.random.default_rng(3)
    profile = calibrate(x, x @ LINEAR * rng.normal(1, 0.1, 300), "test")
    assert 0.05 < profile.fit_error.median < 0.09
    assert Calibrated(profile).headroom() == 1 + profile.fit_error.p90


def test_what_a_busy_server_adds_is_told_apart_from_the_engine() -> None:
    x = np.concatenate([steps(200), steps(200, seed=1)])
    served = np.arange(400) >= 200
    added = served * (3e6 * x[:, F_SLOT] + 0.2e6 * x[:, F_DECODES])
    profile = calibrate(x, x @ LINEAR + added, "test", served=served)
    assert profile.host.step_us == pytest.approx(3000, rel=0.02)
    assert profile.host.token_us == pytest.approx(200, rel=0.05)
    beside_it = steps(1, seed=9)[0]
    expected = beside_it @ LINEAR + 3e6 + 0.2e6 * beside_it[F_DECODES]
    assert Calibrated(profile).iteration_ns(beside_it) == pytest.approx(expected, rel=0.01)


def test_alike_steps_are_left_out_together() -> None:
    """A kind of step that is off is found out only when none of its kind is in the fit."""
    x = np.repeat(steps(10), 20, axis=0)
    kinds = np.repeat(np.arange(10), 20)
    y = x @ LINEAR * np.where(kinds % 2, 1.3, 0.8)
    alone, together = calibrate(x, y, "test"), calibrate(x, y, "test", groups=kinds)
    assert together.fit_error.median > 1.2 * alone.fit_error.median


def test_steps_drawn_from_the_spread_take_as_long_as_those_measured() -> None:
    x, rng = steps(500), np.random.default_rng(3)
    y = x @ LINEAR * rng.lognormal(0.0, 0.2, 500)
    profile = calibrate(x, y, "test")
    spread = Spread(profile, seed=4)
    drawn = np.array([spread.draw() for _ in range(5000)])
    ratio = y / np.array([Calibrated(profile).iteration_ns(f) for f in x])
    for q in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(drawn, q) == pytest.approx(np.quantile(ratio, q), rel=0.08)
    again = Spread(profile, seed=4)
    assert [again.draw() for _ in range(5)] == drawn[:5].tolist()


def test_a_profile_stands_in_for_the_roofline_where_there_is_one_stage() -> None:
    profile = calibrate(steps(60), steps(60) @ LINEAR, "test")
    shape, card = load_model("llama-3-8b"), load_card("h100")
    f = chunk_features([100, 900], [32], [64])
    timing = Profiled(Deployment(shape, card), profile)
    assert timing.iteration_ns(f) == pytest.approx(f @ LINEAR, rel=1e-3)
    assert timing.energy_j(f) > 0
    with pytest.raises(ValueError, match="pp: 2"):
        Profiled(Deployment(shape, card, pp=2), profile)


def test_planes_do_not_decrease_and_nothing_takes_no_time() -> None:
    model = Calibrated(calibrate(steps(60), steps(60) @ LINEAR, "test"))
    assert (model.planes() >= 0).all() and model.iteration_ns(np.zeros(N_FEATURES)) == 0
    before = model.planes().copy()
    model.observe(chunk_features([5]), 10**9)
    np.testing.assert_array_equal(model.planes(), before)


def test_it_survives_a_file(tmp_path: Path) -> None:
    profile = calibrate(steps(60), steps(60) @ LINEAR, "test")
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    (tmp_path / "bad.json").write_text('{"version": 2}')
    with pytest.raises(ValueError, match="version"):
        Profile.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "x,y,message",
    [
        (steps(5), np.ones(5), "5 samples"),
        (steps(20)[:, :3], np.ones(20), "features"),
        (steps(20), np.ones(19), "times"),
        (steps(20), np.zeros(20), "above 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x: F64, y: F64, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(x, y, "test")
