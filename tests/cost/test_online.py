"""The linear cost model that learns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.core.protocols import F_DECODES, F_PAIRS, F_TOKENS, N_FEATURES
from kaiseki.cost.online import FixedLinear, OnlineLinear

TRUE = np.array([20e6, 0.1e6, 1e6, 0.1e6, 50.0, 2.0, 10.0])


def step(rng: np.random.Generator, prefill: bool = True) -> np.ndarray:
    decodes = int(rng.integers(0, 60))
    tokens = int(rng.integers(1, 600)) if prefill else 0
    start = int(rng.integers(0, 4000)) if prefill else 0
    pairs = tokens * (start + (tokens + 1) / 2)
    return np.array([1, decodes, int(prefill), tokens, decodes * 800.0, pairs, start], np.float64)


@pytest.mark.parametrize("wrong", [0.4, 2.5])
def test_it_converges_from_a_wrong_prior(wrong: float) -> None:
    rng, model = np.random.default_rng(1), OnlineLinear(TRUE * wrong)
    for _ in range(600):
        f = step(rng)
        model.observe(f, int(TRUE @ f * rng.normal(1.0, 0.03)))
    errors = []
    for _ in range(200):
        f = step(rng)
        errors.append(abs(float(model.planes()[0, 0] @ f) / (TRUE @ f) - 1))
    assert np.median(errors) < 0.03 and np.quantile(errors, 0.95) < 0.1


def test_what_did_not_occur_keeps_its_weight() -> None:
    rng, model = np.random.default_rng(2), OnlineLinear(TRUE)
    for _ in range(300):
        f = step(rng, prefill=False)
        model.observe(f, int(2 * TRUE @ f))
    moved = model.weights / TRUE
    assert (moved[[F_TOKENS, F_PAIRS]] == 1.0).all()
    assert moved[0] > 1.2 and moved[F_DECODES] > 1.05


def test_what_did_not_occur_keeps_its_certainty() -> None:
    rng, model = np.random.default_rng(2), OnlineLinear(TRUE)
    before = model._covariance[F_TOKENS, F_TOKENS]
    for _ in range(300):
        f = step(rng, prefill=False)
        model.observe(f, int(TRUE @ f))
    assert model._covariance[F_TOKENS, F_TOKENS] == before
    assert model._covariance[F_DECODES, F_DECODES] != before


def test_it_follows_a_card_that_slows_down() -> None:
    rng, model = np.random.default_rng(3), OnlineLinear(TRUE)
    for slow in (1.0, 1.5):
        for _ in range(1500):
            f = step(rng)
            model.observe(f, int(TRUE @ f * slow))
    f = step(rng)
    assert abs(float(model.weights @ f) / (1.5 * TRUE @ f) - 1) < 0.05


def test_a_few_slow_steps_in_a_row_slow_the_next_prediction_and_no_longer_than_they_last() -> None:
    rng, model = np.random.default_rng(5), OnlineLinear(TRUE)
    f = step(rng)

    def run(factor: float, steps: int) -> float:
        for _ in range(steps):
            model.observe(f, int(TRUE @ f * factor))
        return float(model.planes()[0, 0] @ f / (TRUE @ f))

    assert abs(run(1.0, 100) - 1.0) < 0.02
    assert run(1.6, 6) > 1.4
    assert run(1.0, 12) < 1.2


def test_one_wild_step_counts_as_a_few_times_its_prediction() -> None:
    f = np.array([1, 10, 0, 0, 5000.0, 0, 0])
    wild, clipped = OnlineLinear(TRUE, clip=4.0), OnlineLinear(TRUE, clip=4.0)
    wild.observe(f, int(1000 * TRUE @ f))
    clipped.observe(f, int(4 * TRUE @ f))
    assert np.allclose(wild.weights, clipped.weights, rtol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3000), st.integers(0, 10**12)), max_size=40))
def test_weights_stay_positive_and_finite(steps: list[tuple[int, int, int]]) -> None:
    model = OnlineLinear(TRUE)
    for decodes, tokens, measured in steps:
        f = np.array([1, decodes, tokens > 0, tokens, 10.0 * decodes, 5.0 * tokens, 0], np.float64)
        model.observe(f, measured)
        assert (model.weights > 0).all() and np.isfinite(model.weights).all()
        assert 1.0 <= model.headroom() <= 2.0
        assert np.isfinite(model.planes()).all() and (model.planes() > 0).all()


def test_terms_switched_off_stay_off() -> None:
    prior = TRUE.copy()
    prior[F_PAIRS] = 0.0
    rng, model = np.random.default_rng(4), OnlineLinear(prior)
    for _ in range(50):
        f = step(rng)
        model.observe(f, int(TRUE @ f))
    assert model.weights[F_PAIRS] == 0.0


def test_headroom_grows_with_overruns_and_shrinks_again() -> None:
    model, f = OnlineLinear(TRUE), np.array([1.0, 0, 0, 0, 0, 0, 0])
    start = model.headroom()
    for factor in (1.4, 0.7) * 20:
        model.observe(f, int(model.weights @ f * factor))
    high = model.headroom()
    for _ in range(4000):
        model.observe(f, int(model.weights @ f * 0.999))
    assert high > start and model.headroom() < high


def test_steps_that_took_no_time_teach_nothing() -> None:
    model = OnlineLinear(TRUE)
    model.observe(np.array([1.0, 0, 0, 0, 0, 0, 0]), 0)
    model.observe(np.zeros(N_FEATURES), 5)
    assert (model.weights == TRUE).all()


@pytest.mark.parametrize("prior", [np.zeros(N_FEATURES), -TRUE, np.ones(3)])
def test_a_prior_must_make_sense(prior: np.ndarray) -> None:
    with pytest.raises(ValueError, match="prior"):
        OnlineLinear(prior)


def test_the_fixed_model_never_learns() -> None:
    model = FixedLinear(TRUE)
    model.observe(TRUE, 10**9)
    assert (model.planes()[0, 0] == TRUE).all() and model.headroom() == 1.0
