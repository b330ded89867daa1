"""The first guess at step times."""

from __future__ import annotations

import numpy as np

from kaiseki.core.protocols import F_CHUNKS, F_DECODES, F_SLOT, F_TOKENS, N_FEATURES
from kaiseki.cost.linear import GUESS_NS, fit


def test_fit_finds_the_weights_that_made_the_times() -> None:
    rng = np.random.default_rng(3)
    truth = np.array([2e6, 4e5, 1e5, 9e4, 30.0, 5.0, 8.0])
    most = (2, 32, 8, 512, 30_000, 200_000, 20_000)
    features = rng.integers(0, most, (60, N_FEATURES)).astype(np.float64)
    features[:, F_SLOT] = 1.0
    assert np.allclose(fit(features, features @ truth), truth, rtol=1e-3)


def test_terms_that_never_occurred_keep_a_guess_and_none_is_zero() -> None:
    features = np.zeros((10, N_FEATURES))
    features[:, F_SLOT] = 1.0
    features[:, F_DECODES] = np.arange(1, 11)
    weights = fit(features, 1e6 + 2e5 * features[:, F_DECODES])
    assert np.isclose(weights[F_SLOT], 1e6, rtol=1e-6)
    assert np.isclose(weights[F_DECODES], 2e5, rtol=1e-6)
    assert weights[F_TOKENS] == GUESS_NS[F_TOKENS]
    assert (weights > 0).all()
    # Time that depends on nothing but the slot still leaves the other terms a start.
    flat = fit(features, np.full(10, 3e6))
    assert flat[F_DECODES] > 0
    assert flat[F_CHUNKS] > 0


def test_without_a_measurement_there_is_still_a_model() -> None:
    assert (fit(np.empty((0, N_FEATURES)), np.empty(0)) == GUESS_NS).all()
