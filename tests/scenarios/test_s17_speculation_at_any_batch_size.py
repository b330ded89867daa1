"""s17: a draft that is worth it at batch 1; the batch grows.

Guards `best_draft_tokens`: how many drafts is decided anew for each batch size, and may be none.
"""

from __future__ import annotations

import pytest

from kaiseki.cost.cards import load_card
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.speculation import Speculation

BATCHES = (1, 8, 32, 128, 256)
CONTEXT = 500


def pair(card: str, acceptance: float) -> Speculation:
    target, draft = load_model("llama-3-8b"), load_model("smollm2-135m")
    return Speculation(Deployment(target, load_card(card)), Deployment(draft, load_card(card)), acceptance)


@pytest.mark.parametrize("acceptance", [0.3, 0.7])
@pytest.mark.parametrize("card", ["h100", "l4"])
def test_it_is_never_slower_than_none(card: str, acceptance: float) -> None:
    for batch in BATCHES:
        # Acceptance is measured, so what is decided with may be off by a tenth.
        for believed in (0.9 * acceptance, 1.1 * acceptance):
            drafts = pair(card, believed).best_draft_tokens(batch, batch * CONTEXT)
            assert pair(card, acceptance).speed_up(drafts, batch, batch * CONTEXT) >= 0.97


def test_a_fixed_number_of_drafts_is() -> None:
    it = pair("l4", 0.5)
    assert it.speed_up(5, 1, CONTEXT) > 1.2
    assert it.speed_up(5, 256, 256 * CONTEXT) < 0.9
