"""What speculation gains follows from acceptance, placement and batch size."""

from __future__ import annotations

import pytest

from kaiseki.cost.cards import Link, load_card
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.speculation import Speculation, tokens_per_step

CARD = load_card("h100")
TARGET, DRAFT = (
    Deployment(load_model("llama-3-70b"), CARD, tp=4),
    Deployment(load_model("llama-3-8b"), CARD, tp=4),
)
FAR = Link(gb_s=10.0, latency_us=500.0)
BESIDE, APART = Speculation(TARGET, DRAFT, 0.71), Speculation(TARGET, DRAFT, 0.43, FAR)


def test_tokens_of_a_step() -> None:
    assert tokens_per_step(0.5, 0) == 1.0
    assert tokens_per_step(0.5, 2) == 1.75
    assert tokens_per_step(1.0, 4) == 5.0 and tokens_per_step(0.0, 4) == 1.0


@pytest.mark.parametrize(("acceptance", "drafts"), [(1.1, 2), (-0.1, 2), (0.5, -1)])
def test_wrong_input_is_refused(acceptance: float, drafts: int) -> None:
    with pytest.raises(ValueError, match="acceptance"):
        tokens_per_step(acceptance, drafts)


def test_drafts_beside_their_target_pay_and_far_from_it_do_not() -> None:
    assert BESIDE.speed_up(3, 8, 8_000) > 1.2
    assert APART.speed_up(3, 8, 8_000) < 1.0
    assert APART.best_draft_tokens(8, 8_000) <= BESIDE.best_draft_tokens(8, 8_000)


def test_zero_drafts_are_plain_decoding() -> None:
    assert BESIDE.speed_up(0, 16, 16_000) == 1.0
