"""What fits on a card, and what it takes to move things to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.cost.capacity import DoesNotFit, activation_bytes, kv_blocks, kv_bytes_per_token, weight_bytes
from kaiseki.cost.cards import Link, load_card
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.transfers import link_ns, lora_bytes, lora_load_ns, move_ns, swap_ns

A100, H100 = load_card("a100-80"), load_card("h100")
LARGE, SMALL = load_model("llama-2-70b"), load_model("llama-3-8b")
MIXED, LATENT = load_model("qwen3-30b-a3b"), load_model("deepseek-v3")


def test_seventy_billion_fit_on_two_cards_not_on_one() -> None:
    assert kv_blocks(Deployment(LARGE, A100, tp=2)) > 100
    assert kv_blocks(Deployment(LARGE, A100, pp=2)) > 100
    with pytest.raises(DoesNotFit, match=r"Llama 2 70B on 1 x 1 .*weights 128\.5 GiB"):
        kv_blocks(Deployment(LARGE, A100))


def test_eight_billion_leave_most_of_a_card_to_kv() -> None:
    """vLLM reports about 27,000 blocks of 16 tokens for Llama-3-8B on an 80 GB card at 0.9."""
    assert 22_000 < kv_blocks(Deployment(SMALL, A100)) < 30_000


def test_the_largest_models_need_a_node_or_more() -> None:
    with pytest.raises(DoesNotFit):
        kv_blocks(Deployment(LATENT, H100, tp=8))
    assert kv_blocks(Deployment(LATENT, load_card("h200"), tp=8)) > 1000
    with pytest.raises(DoesNotFit):
        kv_blocks(Deployment(load_model("llama-3-405b"), H100, tp=8))
    assert kv_blocks(Deployment(load_model("llama-3-405b"), H100, tp=8, pp=2)) > 1000


@pytest.mark.parametrize("model", [LARGE, SMALL, MIXED, LATENT, load_model("smollm2-135m")])
def test_one_card_holds_all_weights(model) -> None:
    narrow = model.model_copy(update={"weights": "bf16"})
    assert weight_bytes(Deployment(narrow, A100)) == 2 * model.parameters


@given(st.sampled_from([LARGE, SMALL, MIXED]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_cards_share_weights_and_kv(model, tp: int, pp: int) -> None:
    one, many = Deployment(model, A100), Deployment(model, A100, tp=tp, pp=pp)
    assert weight_bytes(one) / (tp * pp) <= weight_bytes(many) <= weight_bytes(one)
    copies = max(1, tp // model.kv_heads)
    assert kv_bytes_per_token(many) == kv_bytes_per_token(one) * copies / (tp * pp)


def test_latent_kv_is_copied_to_every_card() -> None:
    h200 = load_card("h200")
    assert kv_bytes_per_token(Deployment(LATENT, h200, tp=8)) == LATENT.kv_bytes_per_token == 70_272


def test_working_space_grows_with_the_step() -> None:
    deployment = Deployment(SMALL, A100)
    small, large = (activation_bytes(deployment, tokens, 256) for tokens in (512, 8192))
    assert large > small and kv_blocks(deployment, step_tokens=512) > kv_blocks(deployment)
    assert activation_bytes(Deployment(MIXED, A100), 512, 1) > 0


def test_a_message_takes_latency_and_bandwidth() -> None:
    link = Link(gb_s=50, latency_us=10)
    assert link_ns(link, 50e9) == pytest.approx(1e9 + 1e4)
    tokens = 1000
    assert move_ns(Deployment(SMALL, A100), tokens, link) == pytest.approx(1e4 + tokens * 131_072 / 50)


def test_swapping_uses_the_links_of_all_cards() -> None:
    one, two = Deployment(SMALL, A100), Deployment(SMALL, A100, tp=2)
    fixed = A100.host.latency_us * 1e3
    assert swap_ns(two, 10_000) - fixed == pytest.approx((swap_ns(one, 10_000) - fixed) / 2)


def test_adapters() -> None:
    """Rank 16 on all projections of Llama-3-8B, with query, key and value, gate and up each fused."""
    per_layer = (4096 + 6144) + (4096 + 4096) + (4096 + 28672) + (14336 + 4096)
    deployment = Deployment(SMALL, A100)
    assert lora_bytes(deployment, 16) == 32 * per_layer * 16 * 2
    assert lora_load_ns(deployment, 64) > lora_load_ns(deployment, 16) > 1e6
    assert lora_bytes(Deployment(MIXED, A100), 16) == 48 * ((2048 + 5120) + (4096 + 2048)) * 16 * 2
    with pytest.raises(ValueError, match="rank"):
        lora_bytes(deployment, 0)
