"""Profiles from measured steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kaiseki.core.decision import F64
from kaiseki.core.protocols import N_FEATURES
from kaiseki.cost.calibrated import Calibrated, Profile, calibrate
from kaiseki.cost.cards import load_card
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.features import chunk_features
from kaiseki.cost.hf_config import load_model
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
    linear_only = Profile(
        weights=profile.weights, bends=(), fit_error=profile.fit_error, samples=400, source="test"
    )
    f = chunk_features([100])
    assert Calibrated(linear_only).iteration_ns(f) < Calibrated(profile).iteration_ns(f)


def test_noise_shows_in_error_and_headroom() -> None:
    x, rng = steps(300), np.random.default_rng(3)
    profile = calibrate(x, x @ LINEAR * rng.normal(1, 0.1, 300), "test")
    assert 0.05 < profile.fit_error.median < 0.09
    assert Calibrated(profile).headroom() == 1 + profile.fit_error.p90


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
