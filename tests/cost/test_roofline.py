"""The roofline: what must hold of it whatever the figures are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaiseki.core.costs import predict_ns
from kaiseki.core.decision import F64
from kaiseki.core.jit import kernel
from kaiseki.core.protocols import N_FEATURES
from kaiseki.cost.cards import card_names, load_card
from kaiseki.cost.deployment import EAGER_LAUNCH_US, Deployment, HostTime
from kaiseki.cost.features import chunk_features
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.model_shape import model_names
from kaiseki.cost.roofline import Roofline, experts_visited

LLAMA = Roofline(Deployment(load_model("llama-2-70b"), load_card("a100-80"), tp=4))
QWEN = Roofline(Deployment(load_model("qwen3-30b-a3b"), load_card("h100")))
DEEPSEEK = Roofline(Deployment(load_model("deepseek-v3"), load_card("h200"), tp=8))
STAGED = Roofline(Deployment(load_model("llama-3-405b"), load_card("h100"), tp=8, pp=4, host=HostTime(500)))
MODELS = [LLAMA, QWEN, DEEPSEEK, STAGED]

contexts = st.lists(st.integers(1, 30_000), max_size=64)
chunks = st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 8192)), max_size=4)
sets = st.builds(
    lambda c, p: chunk_features(c, [s for s, _ in p], [n for _, n in p]), contexts, chunks
)  # fmt: skip


@kernel
def planes_ns(planes: F64, features: F64) -> float:
    return predict_ns(planes, features)


@given(st.sampled_from([LLAMA, STAGED]), sets)
def test_of_dense_models_the_planes_are_the_model(model: Roofline, features: F64) -> None:
    assert planes_ns(model.planes(), features) == model.iteration_ns(features)


@given(st.sampled_from(MODELS), sets)
def test_it_is_the_sum_of_its_kernels_and_of_its_stages(model: Roofline, features: F64) -> None:
    time = model.iteration_ns(features)
    parts = model.kernel_ns(features)
    assert sum(parts.values()) == pytest.approx(time, rel=1e-9) and min(parts.values()) >= -1e-6 * time
    visited = experts_visited(*model.routing[:2], features[1] + features[3]) if model.routing[0] else 0.0
    stages = range(model.deployment.pp)
    each = [(model.stage_terms(s) @ np.append(features, visited)).max(1).sum() for s in stages]
    assert sum(each) == pytest.approx(time, rel=1e-9)
    if features.any():
        assert len(each) == 1 or max(each) < time


@given(st.sampled_from(MODELS), st.lists(sets, min_size=1, max_size=5))
def test_many_at_once_are_the_same_as_one_by_one(model: Roofline, several: list[F64]) -> None:
    one_by_one = [model.iteration_ns(f) for f in several]
    np.testing.assert_array_equal(model.iterations_ns(np.array(several)), one_by_one)


@given(st.sampled_from(MODELS), sets, st.integers(0, N_FEATURES - 1), st.floats(0, 1e4))
def test_more_work_never_takes_less_time(model: Roofline, features: F64, which: int, more: float) -> None:
    grown = features.copy()
    grown[which] += more
    least = model.iteration_ns(features)
    assert model.iteration_ns(grown) >= least * (1 - 1e-12)
    assert (model.planes() >= 0).all()


@settings(max_examples=50)
@given(st.sampled_from([QWEN, DEEPSEEK]), sets, st.integers(1, 512))
def test_with_experts_the_planes_bound_the_model_and_touch_it(
    model: Roofline, features: F64, decodes: int
) -> None:
    here = chunk_features([1000] * decodes)
    fresh = Roofline(model.deployment)
    fresh.observe(here, 1)
    fresh.observe(chunk_features([], [0], [100]), 1)
    assert (fresh.planes() >= 0).all()
    assert planes_ns(fresh.planes(), features) >= fresh.iteration_ns(features) * (1 - 1e-12)
    apart = planes_ns(fresh.planes(), here) / fresh.iteration_ns(here) - 1
    assert apart < 1e-12


@given(st.sampled_from(MODELS), sets)
def test_power_is_between_idle_and_peak(model: Roofline, features: F64) -> None:
    seconds = model.iteration_ns(features) * 1e-9
    card, tp = model.deployment.card, model.deployment.tp
    energy = model.energy_j(features)
    assert tp * card.idle_watts * seconds <= energy <= tp * card.peak_watts * seconds * (1 + 1e-9)
    assert 0 <= model.busy_share(features) <= 1 + 1e-9


def test_nothing_takes_no_time() -> None:
    nothing = np.zeros(N_FEATURES)
    for model in MODELS:
        assert model.iteration_ns(nothing) == 0 and model.energy_j(nothing) == 0


@pytest.mark.parametrize("model", model_names())
@pytest.mark.parametrize("card", card_names())
def test_every_pair_gives_sensible_times(model: str, card: str) -> None:
    """No faster than reading the active weights, and slower with a long prompt."""
    shape, roofline = load_model(model), Roofline(Deployment(load_model(model), load_card(card)))
    decode, prefill = chunk_features([100]), chunk_features([], [0], [4096])
    active = shape.layers * shape.hidden * shape.heads * shape.head_dim
    assert roofline.iteration_ns(decode) > active / load_card(card).memory_gb_s
    assert roofline.iteration_ns(prefill) > roofline.iteration_ns(decode)


def test_tensor_parallelism_pays_less_and_less() -> None:
    """Two cards are faster than one but not twice, and communication takes a growing share."""
    shape, card = load_model("llama-3-8b"), load_card("h100")
    for features in (chunk_features([1000] * 16), chunk_features([], [0], [2048])):
        times = [Roofline(Deployment(shape, card, tp=tp)).iteration_ns(features) for tp in (1, 2, 4, 8)]
        ratios = np.array(times[:-1]) / times[1:]
        assert (ratios < 2).all() and (np.diff(ratios) < 0).all() and ratios[0] > 1


def test_kv_heads_are_copied_when_there_are_fewer_than_cards() -> None:
    shape, card = load_model("qwen3-30b-a3b"), load_card("h100")
    features = chunk_features([30_000] * 8)
    attention = [
        Roofline(Deployment(shape, card, tp=tp)).kernel_ns(features)["attention.decode_attention"]
        for tp in (4, 8)
    ]
    assert attention[1] == pytest.approx(attention[0], rel=0.01)


def test_a_stage_is_faster_than_the_pass_and_the_host_counts_once() -> None:
    features = chunk_features([1000] * 16)
    whole = Roofline(Deployment(load_model("llama-3-405b"), load_card("h100"), tp=8, host=HostTime(500)))
    staged_host = STAGED.kernel_ns(features)["host"]
    assert staged_host == pytest.approx(500e3) and whole.kernel_ns(features)["host"] == pytest.approx(500e3)
    assert STAGED.iteration_ns(features) > whole.iteration_ns(features)


def test_eager_launches_slow_down_small_steps_only() -> None:
    shape, card = load_model("llama-3-8b"), load_card("h100")
    graph, eager = (Roofline(Deployment(shape, card, launch_us=launch)) for launch in (0.0, EAGER_LAUNCH_US))
    small, large = chunk_features([100]), chunk_features([], [0], [32_768])
    assert eager.iteration_ns(small) > 1.05 * graph.iteration_ns(small)
    assert eager.iteration_ns(large) < 1.01 * graph.iteration_ns(large)


def test_verifying_drafts_costs_less_than_decoding_them() -> None:
    plain, card = load_model("llama-3-70b"), load_card("h100")
    once = Roofline(Deployment(plain, card, tp=4))
    verify = Roofline(Deployment(plain, card, tp=4, draft_tokens=3))
    features = chunk_features([2000] * 8)
    assert once.iteration_ns(features) < verify.iteration_ns(features) < 1.5 * once.iteration_ns(features)
    many = chunk_features([2000] * 512)
    assert verify.iteration_ns(many) > 1.5 * once.iteration_ns(many)


def test_each_part_of_the_host_is_counted() -> None:
    host = HostTime(base_us=1000, per_card_us=100, per_token_us=1, per_sequence_us=10, per_pair_ns=2)
    shape, card = load_model("llama-3-8b"), load_card("h100")
    model = Roofline(Deployment(shape, card, tp=2, host=host, draft_tokens=1))
    features = chunk_features([50] * 3, [0], [100])
    expected = 1e6 + 2e5 + 1e3 * (3 * 2 + 100) + 1e4 * 4 + 2 * 5050
    assert model.kernel_ns(features)["host"] == pytest.approx(expected)


@given(st.integers(1, 512), st.data(), st.integers(1, 100_000))
def test_experts_visited_are_few_at_first_and_never_more_than_there_are(
    experts: int, data: st.DataObject, tokens: int
) -> None:
    active = data.draw(st.integers(1, experts))
    visited = experts_visited(float(experts), float(active), float(tokens))
    assert active * (1 - 1e-9) <= visited <= min(experts, active * tokens) * (1 + 1e-9)


def test_experts_visited_against_drawing_them() -> None:
    rng = np.random.default_rng(0)
    drawn = [
        len({e for _ in range(20) for e in rng.choice(128, 8, replace=False)}) for _ in range(200)
    ]  # fmt: skip
    assert experts_visited(128.0, 8.0, 20.0) == pytest.approx(np.mean(drawn), rel=0.01)


def test_few_tokens_read_few_experts() -> None:
    one, many = chunk_features([100]), chunk_features([100] * 64)
    times = [QWEN.kernel_ns(f)["moe.experts_ffn_in"] for f in (one, many)]
    assert times[1] > 5 * times[0]


def test_headroom_is_as_asked() -> None:
    assert LLAMA.headroom() == 1.0 and Roofline(LLAMA.deployment, headroom=1.2).headroom() == 1.2


@pytest.mark.parametrize(
    "change,message",
    [
        ({"tp": 3}, "heads"), ({"tp": 0}, "heads"), ({"tp": 16}, "node"), ({"pp": 0}, "stages"),
        ({"pp": 81}, "stages"), ({"draft_tokens": -1}, "draft_tokens"), ({"launch_us": -1.0}, "launch_us"),
    ],
)  # fmt: skip
def test_a_split_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Deployment(load_model("llama-2-70b"), load_card("a100-80"), **change)


def test_a_set_that_cannot_be_is_refused() -> None:
    for wrong in (([], [0], [0]), ([], [-1], [5]), ([-1], [], []), ([], [0, 1], [5])):
        with pytest.raises(ValueError, match="chunks"):
            chunk_features(*wrong)
