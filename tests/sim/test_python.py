"""What docs/python.md shows works, and wrong arguments are named."""

from __future__ import annotations

import pytest

from kaiseki.policies.registry import UnknownPolicy
from kaiseki.sim import Wanted, WrongArgument, compare, open_case, open_policy, simulate


def test_a_case_is_opened_by_names_and_changed() -> None:
    case = open_case("chat-sessions", cluster="70b-8xh100", requests=6, scale=0.2)
    assert len(case.fleet) == 1 and case.shape.requests == 6
    figures = simulate(case, open_policy("kaiseki"))
    assert figures["requests"] == 6 and figures["classes"]
    assert case.scaled(2.0).shape.rate_scale == pytest.approx(0.4)
    assert case.with_settings(quantum_tokens=64).settings.quantum_tokens == 64
    found = compare(case.first(3), Wanted({"a": open_policy("fcfs", budget_tokens=256)}))
    assert found.document["policies"]["a"]["budget_tokens"] == 256 and found.runs["a"].log.endings


def test_policies_are_opened_by_name() -> None:
    assert open_policy("clairvoyant").name == "clairvoyant"
    assert open_policy("fcfs", gives_up=True).gives_up and open_policy("kaiseki", 64).budget_tokens is None
    with pytest.raises(UnknownPolicy, match="fcfs"):
        open_policy("magic")


@pytest.mark.parametrize(
    ("arguments", "argument", "says"),
    [
        ({"trace": "nowhere.csv"}, "trace", "chat-sessions"),
        ({"trace": "chat-sessions", "cluster": "mine"}, "cluster", "70b-8xa100"),
        ({"trace": "chat-sessions", "classes": "mine"}, "classes", "mixed"),
        ({"trace": "chat-sessions", "router": "best"}, "router", "least-work"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, str], argument: str, says: str) -> None:
    with pytest.raises(WrongArgument, match=says) as caught:
        open_case(**arguments)  # type: ignore[arg-type]
    assert caught.value.argument == argument
