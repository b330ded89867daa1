"""Cluster files: what they give, and what is said about mistakes."""

from __future__ import annotations

import pytest

from kaiseki.sections import ConfigError
from kaiseki.sim import cluster

SPLIT = """
model: llama-3-8b
pools:
  - {name: p, role: prefill, card: h100}
  - {name: d, role: decode, card: h100}
links: {gb_s: 45}
"""
GOOD = "model: llama-2-70b\npools: [{name: a, card: a100-80, cards: 8, tp: 4}]\n"


def problems(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cluster.fleet(cluster.parse(text))
    return "\n".join(f"{p.path}: {p.value} {p.message}" for p in caught.value.problems)


def test_cards_make_up_replicas() -> None:
    replicas = cluster.fleet(cluster.parse(GOOD))
    assert len(replicas) == 2 and all(r.deployment.tp == 4 for r in replicas)
    assert replicas[0].blocks > 1000


@pytest.mark.parametrize("name", cluster.shipped())
def test_what_comes_along_fits(name: str) -> None:
    assert cluster.fleet(cluster.load(name))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (GOOD.replace("a100-80", "a200"), ("pools[0].card", "a200", "h100")),
        (GOOD.replace("llama-2-70b", "llama-9"), ("model", "llama-9", "llama-2-70b")),
        (GOOD.replace("cards: 8", "cards: 7"), ("pools[0].cards", "7", "replicas x tp x pp")),
        (GOOD.replace("tp: 4", "tp: 3"), ("pools[0]", "3")),
        (GOOD.replace("cards: 8, tp: 4", "cards: 1"), ("pools[0].card", "leave no KV block")),
        (GOOD.replace("cards: 8", "cards: many"), ("pools[0].cards", "many")),
        (GOOD.replace("name: a,", "name: a, role: both,"), ("pools[0].role", "both", "mixed", "prefill")),
        (GOOD.replace("name: a,", "name: a, role: prefill,"), ("pools", "prefill", "role: decode")),
        (GOOD.replace("name: a,", "name: a, role: decode,"), ("pools", "decode", "role: prefill")),
        (GOOD + "links: {gb_s: 45}", ("links", "45", "only prefill and decode pools")),
        (SPLIT.replace("links", "#"), ("links", "gb_s, latency_us, max_active, feedback_us, headroom")),
        (SPLIT.replace("name: d", "name: p"), ("pools[1].name", "p", "its own")),
        (SPLIT.replace("gb_s: 45", "gb_s: 0"), ("links.gb_s", "0", "greater than 0")),
        (SPLIT.replace("gb_s: 45", "headroom: 0.3"), ("links.gb_s", "required")),
        (SPLIT.replace("gb_s: 45", "gb_s: 45, headroom: 1"), ("links.headroom", "1", "less than 1")),
        (SPLIT.replace("gb_s: 45", "gb_s: 45, max_active: 0"), ("links.max_active", "0", "equal to 1")),
        (SPLIT.replace("gb_s: 45", "gb_s: 45, latency_us: -1"), ("links.latency_us", "-1", "equal to 0")),
        (SPLIT.replace("gb_s: 45", "gb_s: 45, feedback_us: x"), ("links.feedback_us", "x", "number")),
        (SPLIT.replace("gb_s: 45", "gb_s: 45, from: p"), ("links.from", "p", "allowed: feedback_us")),
        (SPLIT.replace("{gb_s: 45}", "[{gb_s: 45}]"), ("links", "must be a mapping with gb_s")),
        (SPLIT + "happens: []", ("happens", "unknown key", "links")),
        (GOOD.replace("name: a,", "name: a, gpus: 3,"), ("pools[0].gpus",)),
        ("pools: []", ("model", "pools")),
        ("[]", ("mapping",)),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(wrong: str, says: tuple[str, ...]) -> None:
    text = problems(wrong)
    for part in says:
        assert part in text
