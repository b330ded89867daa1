"""The load: offered work, mix, arrivals."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from kaiseki.demo.load import MOST_INTERACTIVE, LoneTime, fit_lone_time, make_load, mixed
from kaiseki.demo.prompts import BATCH, INTERACTIVE, PromptMaker

LONE = LoneTime(base_s=0.02, prompt_s=0.003, output_s=0.025)


def work(prompts):
    total = {INTERACTIVE: 0.0, BATCH: 0.0}
    for prompt in prompts:
        total[prompt.cls] += LONE.work_s(prompt)
    return total


def test_the_fit_finds_the_times_it_was_given(prompt):
    prompts = [prompt(prompt_tokens=p, output_tokens=o) for p, o in ((20, 16), (40, 8), (700, 24), (800, 30))]
    first = [LONE.prefill_s(p.prompt_tokens) for p in prompts]
    last = [LONE.work_s(p) for p in prompts]
    fitted = fit_lone_time(prompts, first, last)
    assert fitted.base_s == pytest.approx(LONE.base_s, rel=1e-6)
    assert fitted.prompt_s == pytest.approx(LONE.prompt_s, rel=1e-6)
    assert fitted.output_s == pytest.approx(LONE.output_s, rel=1e-6)


def test_interactive_work_never_exceeds_its_part(encode):
    prompts = list(islice(mixed(PromptMaker(encode, 1), LONE), 200))
    for count in (1, 10, 50, 200):
        total = work(prompts[:count])
        assert total[INTERACTIVE] <= MOST_INTERACTIVE * sum(total.values()) + 1e-9
    assert total[INTERACTIVE] >= 0.38 * sum(total.values())


@pytest.mark.parametrize("seed", range(5))
def test_a_load_offers_what_it_says(encode, seed):
    load = make_load(PromptMaker(encode, seed), LONE, sustainable=1.5, seconds=90.0, seed=seed)
    total = work(arrival.prompt for arrival in load.arrivals)
    assert sum(total.values()) / (1.5 * 90.0) == pytest.approx(load.offered_ratio)
    assert load.offered_ratio == pytest.approx(1.3, rel=0.02)
    assert total[INTERACTIVE] / sum(total.values()) == pytest.approx(load.interactive_share)
    assert 0.37 <= load.interactive_share <= MOST_INTERACTIVE
    times = [arrival.at_s for arrival in load.arrivals]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 90


def test_gaps_between_arrivals_are_exponential(encode):
    gaps = []
    for seed in range(6):
        load = make_load(PromptMaker(encode, seed), LONE, sustainable=3.0, seconds=90.0, seed=seed)
        gap = np.diff([arrival.at_s for arrival in load.arrivals])
        gaps.append(gap / gap.mean())
    spread = np.concatenate(gaps).std()
    assert spread == pytest.approx(1.0, abs=0.12)


def test_the_same_seed_is_the_same_load(encode):
    one, two = (make_load(PromptMaker(encode, 7), LONE, 1.0, 30.0, 7) for _ in range(2))
    assert one == two
