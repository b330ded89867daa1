"""Cluster files: what they give, and what is said about mistakes."""

from __future__ import annotations

import pytest

from kaiseki.sections import ConfigError
from kaiseki.sim import cluster

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
        (GOOD.replace("name: a,", "name: a, role: prefill,"), ("pools[0].role", "prefill", "mixed")),
        (GOOD.replace("name: a,", "name: a, gpus: 3,"), ("pools[0].gpus",)),
        ("pools: []", ("model", "pools")),
        ("[]", ("mapping",)),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(wrong: str, says: tuple[str, ...]) -> None:
    text = problems(wrong)
    for part in says:
        assert part in text
