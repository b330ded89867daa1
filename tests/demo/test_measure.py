"""What follows from measurements."""

from __future__ import annotations

import numpy as np
import pytest

from kaiseki.demo.load import LoneTime
from kaiseki.demo.measure import Measured, MeasureError, nearest_median, output_work, step_ms
from kaiseki.demo.prompts import BATCH, INTERACTIVE
from kaiseki.demo.run import reason_for

LONE = LoneTime(base_s=0.01, prompt_s=0.001, output_s=0.02)


def measured(step: float, prompt_s: float) -> Measured:
    return Measured(50.0, 1500.0, step, LoneTime(0.01, prompt_s, 0.02), (40, 700))


def test_targets():
    targets = measured(30.0, 0.001).targets
    assert (targets[INTERACTIVE].ttft_ms, targets[INTERACTIVE].tbt_ms) == (250.0, 60.0)
    assert targets[BATCH].deadline_ms == 7500.0


@pytest.mark.parametrize(
    ("step", "per_token_s", "budget"),
    [(100.0, 0.0001, 512), (30.0, 0.0001, 256), (30.0, 0.0002, 128), (30.0, 0.01, 64)],
)
def test_the_budget_that_the_cost_model_picks(step, per_token_s, budget):
    found = measured(step, per_token_s)
    assert found.budget() == budget
    assert ("smallest" in reason_for(found, budget)) == (per_token_s == 0.01)


def test_nearest_to_the_median(prompt):
    prompts = [prompt(prompt_tokens=n, output_tokens=10) for n in (10, 30, 29, 31, 90)]
    assert [p.prompt_tokens for p in nearest_median(prompts, 3)] == [30, 29, 31]


def test_a_step_counts_only_while_all_decode(answer):
    early, late = answer([0, 5, 10, 110, 210, 310]), answer([10, 110, 210, 310, 315])
    assert step_ms([early, late]) == 100.0
    with pytest.raises(MeasureError, match="overlap"):
        step_ms([answer([0, 5]), answer([10, 20])])


def test_work_counts_where_its_tokens_are(answer, prompt):
    done = answer([100.0, 200.0, 300.0], prompt=prompt(BATCH, 700, 3))
    whole = output_work(done, LONE, 0, 1000)
    assert whole + 700 * LONE.prompt_s == pytest.approx(LONE.work_s(done.prompt))
    assert output_work(done, LONE, 150, 1000) == pytest.approx(2 * LONE.output_s)
    assert output_work(done, LONE, 0, 150) == pytest.approx(LONE.base_s)
    assert output_work(answer([], finished=False), LONE, 0, 1000) == 0.0
    assert isinstance(done.gaps_ms, np.ndarray)
