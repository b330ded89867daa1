"""Who met its targets, and the figures made of it."""

from __future__ import annotations

import numpy as np
import pytest

from kaiseki.demo.attainment import (
    Targets,
    attained,
    class_figures,
    output_rate,
    percentiles,
    policy_figures,
    still_open_ms,
)
from kaiseki.demo.prompts import BATCH, INTERACTIVE

CHAT = Targets(ttft_ms=100.0, tbt_ms=20.0)
BOTH = {INTERACTIVE: CHAT, BATCH: Targets(deadline_ms=1000.0)}


def paced(first: float, gap: float, count: int, late: int = 0) -> list[float]:
    gaps = np.full(count - 1, gap)
    gaps[:late] = 50.0
    return [first, *(first + np.cumsum(gaps))]


@pytest.mark.parametrize(
    ("times", "met"),
    [
        (paced(100, 20, 30), True),
        (paced(100.1, 20, 30), False),
        (paced(50, 10, 30, late=1), True),
        (paced(50, 10, 30, late=2), False),
        (paced(50, 10, 201, late=2), True),
        (paced(50, 10, 201, late=3), False),
        ([100.0], True),
    ],
)
def test_first_token_and_gaps(answer, times, met):
    assert attained(answer(times), CHAT) is met


def test_what_did_not_end_well_is_missed(answer):
    assert not attained(answer([10.0, 20.0], finished=False), CHAT)
    assert not attained(answer([10.0, 20.0], demoted=True), CHAT)
    assert not attained(answer([], finished=False, status=429, error="queue_full"), CHAT)


def test_deadline(answer):
    assert attained(answer([500.0, 1000.0]), BOTH[BATCH])
    assert not attained(answer([500.0, 1000.1]), BOTH[BATCH])


def test_how_long_a_request_may_still_make_it():
    assert still_open_ms(BOTH[BATCH], 30) == 1000.0
    assert still_open_ms(CHAT, 30) >= 100 + 29 * 20
    assert still_open_ms(Targets(), 30) == float("inf")


def test_percentiles_of_nothing_are_not_zero():
    assert set(percentiles([]).values()) == {None}
    assert set(percentiles([float("nan")]).values()) == {None}
    assert percentiles([1.0, 2.0, 3.0])["p50"] == 2.0


def test_only_tokens_within_the_span_count(answer):
    answers = [answer([900.0, 1000.0, 1500.0]), answer([2000.0, 2000.1])]
    assert output_rate(answers, start_ms=1000.0, seconds=1.0) == 3.0


def test_figures(answer, prompt):
    batch = prompt(BATCH, 700, 2)
    answers = [
        answer(paced(50, 10, 4)),
        answer(paced(150, 10, 4)),
        answer([400.0, 500.0], prompt=batch),
        answer([], prompt=batch, finished=False, status=503, error="expired"),
    ]
    found = policy_figures(answers, BOTH, start_ms=0.0, seconds=1.0)
    assert (found["requests"], found["attained"], found["attainment"]) == (4, 2, 0.5)
    assert found["output_tokens_per_s"] == 10.0
    chat = found["classes"][INTERACTIVE]
    assert (chat["attainment"], chat["ttft_ms"]["p50"], chat["ttft_target_ms"]) == (0.5, 100.0, 100.0)
    assert found["classes"][BATCH]["without_token"] == 1
    assert found["classes"][BATCH]["refused_or_expired"] == 1


def test_a_class_without_requests():
    found = class_figures([], CHAT)
    assert found["attainment"] is None
    assert found["tbt_ms"]["p50"] is None
