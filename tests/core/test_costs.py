"""Prediction, its slope and its inverse."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from kaiseki.core.costs import (
    add_decode,
    add_prefill,
    fit_prefill,
    gradient_ns,
    lone_rates,
    predict_ns,
    share_ns,
)
from kaiseki.core.protocols import F_CHUNKS, F_CONTEXT, F_DECODES, F_PAIRS, F_PREFIX, F_TOKENS, N_FEATURES

weights = st.floats(0.0, 1e6, allow_nan=False)
planes = st.integers(1, 3).flatmap(
    lambda j: st.lists(weights, min_size=2 * j * N_FEATURES, max_size=2 * j * N_FEATURES).map(
        lambda w: np.array(w).reshape(2, j, N_FEATURES)
    )
)
chunks = st.lists(st.tuples(st.booleans(), st.integers(0, 5000), st.integers(1, 500)), max_size=6)


def longest(planes: np.ndarray, features: np.ndarray, start: int, most: int, limit: float) -> int:
    return fit_prefill(planes, features, np.empty(N_FEATURES), float(start), most, limit)


def slope_at(planes: np.ndarray, features: np.ndarray) -> np.ndarray:
    slope = np.empty(N_FEATURES)
    gradient_ns(planes, features, slope)
    return slope


def marginal_ns(
    planes: np.ndarray, features: np.ndarray, decode: np.ndarray, start: np.ndarray, chunk: np.ndarray
) -> np.ndarray:
    slope = slope_at(planes, features)
    parts = zip(decode.tolist(), start.tolist(), chunk.tolist(), strict=True)
    return np.array([share_ns(slope, d, s, c) for d, s, c in parts])


def features_of(parts: list[tuple[bool, int, int]]) -> np.ndarray:
    features = np.zeros(N_FEATURES)
    for decode, start, tokens in parts:
        if decode:
            add_decode(features, float(start + 1))
        else:
            add_prefill(features, float(start), float(tokens))
    return features


def test_features_of_a_set() -> None:
    f = features_of([(True, 99, 1), (False, 10, 3)])
    assert f.tolist() == [1, 1, 1, 3, 100, 11 + 12 + 13, 10]


def test_a_prefill_taken_back_leaves_nothing() -> None:
    f = features_of([(False, 7, 30), (False, 10, 3)])
    add_prefill(f, 7.0, -30.0)
    assert np.allclose(f, features_of([(False, 10, 3)]))


def test_pairs_add_up_over_any_chunking() -> None:
    whole = features_of([(False, 0, 1000)])
    parts = features_of([(False, 0, 300), (False, 300, 17), (False, 317, 683)])
    assert whole[F_PAIRS] == parts[F_PAIRS] and whole[F_TOKENS] == parts[F_TOKENS]


@given(planes, chunks, st.integers(0, 9000), st.integers(0, 3000), st.floats(0, 1e10))
def test_the_longest_chunk_that_fits_is_exact(
    planes: np.ndarray, before: list[tuple[bool, int, int]], start: int, most: int, limit: float
) -> None:
    features = features_of(before)
    fits = longest(planes, features, start, most, limit)

    def cost(tokens: int) -> float:
        trial = features.copy()
        add_prefill(trial, float(start), float(tokens))
        return predict_ns(planes, trial)

    assert 0 <= fits <= most
    if fits > 0:
        assert cost(fits) <= limit
    if fits < most:
        assert cost(fits + 1) > limit


@given(planes, chunks)
def test_the_slope_is_that_of_the_active_planes(
    planes: np.ndarray, parts: list[tuple[bool, int, int]]
) -> None:
    assume(parts)
    features = features_of(parts)
    slope = slope_at(planes, features)
    assert np.isclose(slope @ features, predict_ns(planes, features), rtol=1e-9)
    assert (slope >= 0).all()


@given(st.lists(weights, min_size=N_FEATURES, max_size=N_FEATURES), chunks)
def test_marginal_costs_and_the_fixed_part_make_the_whole(
    w: list[float], parts: list[tuple[bool, int, int]]
) -> None:
    assume(parts)
    planes = np.array(w).reshape(1, 1, -1)
    decode = np.array([p[0] for p in parts])
    start = np.array([p[1] for p in parts], np.int32)
    chunk = np.array([1 if p[0] else p[2] for p in parts], np.int32)
    features = features_of(parts)
    added = marginal_ns(planes, features, decode, start, chunk)
    assert np.isclose(added.sum() + w[0], predict_ns(planes, features), rtol=1e-6)


def test_marginal_costs_of_long_chunks_do_not_overflow() -> None:
    planes = np.zeros((1, 1, N_FEATURES))
    planes[0, 0, F_PAIRS] = 1.0
    features = features_of([(False, 900_000, 100_000)])
    start, chunk = np.array([900_000], np.int32), np.array([100_000], np.int32)
    added = marginal_ns(planes, features, np.array([False]), start, chunk)
    assert np.isclose(added[0], predict_ns(planes, features))


@given(planes, st.integers(1, 4000))
def test_lone_rates_never_promise_too_much_on_one_plane(planes: np.ndarray, tokens: int) -> None:
    linear = planes[:1, :1]
    slot, token, decode = lone_rates(linear)
    assert slot + token * tokens <= predict_ns(linear, features_of([(False, 0, tokens)])) * (1 + 1e-9) + 1e-6
    assert decode <= predict_ns(linear, features_of([(True, tokens, 1)])) * (1 + 1e-9)


def test_features_have_the_places_that_their_names_say() -> None:
    assert (F_DECODES, F_CHUNKS, F_TOKENS, F_CONTEXT, F_PAIRS, F_PREFIX) == (1, 2, 3, 4, 5, 6)
