"""Does token-level scheduling pay for this load on this fleet, and with which settings? Numbers first.

Each option is simulated on the same requests. Nothing is concluded from a rule of thumb alone: the three
conditions under which it is said to pay are checked and shown beside what the simulation found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kaiseki.core.policy import Policy
from kaiseki.core.requests import NEVER_NS
from kaiseki.policies.registry import load
from kaiseki.sim.run import Case, lone_prefill_s, simulate
from kaiseki.sim.search import Simulate, best_budget
from kaiseki.work.assigning import Assigner
from kaiseki.work.batches import Batch

QUANTA = (16, 64, 256)
TIGHT_TTFT_MS = 500.0
LONG_TAIL = 0.05
LONG_OVER_MEDIAN = 4.0
"""A prompt so many times as long as the median is of the long tail."""
OVERLOAD = 4.0
"""Times the given rate at which the throughput of request-level batching is compared."""
GAIN = 0.02
"""Attainment that token-level scheduling must add to be worth a change."""
ENOUGH = 0.9
"""Attainment from which a fleet does."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the load looks like.

    Attributes:
        requests: how many.
        tightest_ttft_ms: the tightest target of a request; None where no request has one.
        kinds: different sets of targets that requests have.
        long_share: requests of the long tail.
    """

    requests: int
    tightest_ttft_ms: float | None
    kinds: int
    long_share: float


def traffic(case: Case) -> Traffic:
    """Look at the requests of a case, without running them.

    Raises:
        TraceError: the load can't be read.
    """
    prompts, ttft, kinds = [], NEVER_NS, set()
    for batch in _assigned(case):
        prompts.append(batch.prompt_tokens)
        ttft = min(ttft, int(batch.ttft_ns.min(initial=NEVER_NS)))
        kinds |= set(batch.class_index.tolist())
    lengths = np.concatenate(prompts) if prompts else np.zeros(0, np.int32)
    classes = case.plan.service_classes()
    targets = {(classes[k].ttft_ns, classes[k].tbt_ns, classes[k].deadline_ns) for k in kinds}
    is_long = lengths > LONG_OVER_MEDIAN * np.median(lengths) if lengths.size else np.zeros(0, np.bool_)
    return Traffic(
        lengths.size,
        None if ttft >= NEVER_NS else ttft / 1e6,
        len(targets),
        float(is_long.mean()) if lengths.size else 0.0,
    )


def _assigned(case: Case) -> Iterator[Batch]:
    return Assigner(case.plan, lone_prefill_s(case.fleet), case.seed).stream(case.stream(case.shape))


def advise(fleets: Mapping[str, Case], run: Simulate = simulate) -> dict[str, Any]:
    """The verdict, the reasons for it, and every option with its figures.

    Args:
        fleets: the same load on one or more fleets, by their names.
        run: simulates a case under a policy.

    Raises:
        TraceError: the load can't be read.
    """
    first = next(iter(fleets.values()))
    found = traffic(first)
    options = [option for name, case in fleets.items() for option in _options(name, case, run)]
    best = max((o for o in options if o["policy"] == "kaiseki"), key=_worth)
    usual = max(
        (o for o in options if o["policy"] != "kaiseki" and o["cluster"] == best["cluster"]), key=_worth
    )
    gap = _admission_gap(fleets[best["cluster"]], run)
    pays = best["attainment"] - usual["attainment"] >= GAIN
    return {
        "verdict": _verdict(pays, best, usual),
        "pays": pays,
        "reasons": _reasons(found, best, usual, gap),
        "recommended": {key: best[key] for key in ("cluster", "policy", "quantum_tokens", "mode")},
        "options": options,
    }


def _options(cluster: str, case: Case, run: Simulate) -> Iterator[dict[str, Any]]:
    for name in ("static", "fcfs", "priority"):
        policy = load(name)
        if name != "static":
            policy = best_budget(case, policy, run)
        yield _option(cluster, case, policy, run)
    for quantum in QUANTA:
        yield _option(cluster, case.with_settings(quantum_tokens=quantum), load("kaiseki"), run)


def _option(cluster: str, case: Case, policy: Policy, run: Simulate) -> dict[str, Any]:
    figures = run(case, policy)
    return {
        "cluster": cluster,
        "policy": policy.name,
        "mode": "mixed",
        "budget_tokens": policy.budget_tokens,
        "quantum_tokens": case.settings.quantum_tokens,
        "cards": figures["cards"],
        "attainment": figures["attainment"] or 0.0,
        "goodput_rps": figures["goodput_rps"],
        "output_tokens_per_s": figures["output_tokens_per_s"],
        "ttft_p99_ms": figures["ttft_ms"]["p99"] if figures["ttft_ms"] else None,
        "usd_per_million_output_tokens": figures["usd_per_million_output_tokens"],
    }


def _worth(option: Mapping[str, Any]) -> tuple[bool, float, float]:
    """A fleet that does comes first, the cheapest of these; otherwise whoever attains most."""
    enough = option["attainment"] >= ENOUGH
    price = option["usd_per_million_output_tokens"] or np.inf
    return enough, -price if enough and np.isfinite(price) else 0.0, option["attainment"]


def _admission_gap(case: Case, run: Simulate) -> float | None:
    """Part of the tokens/s under overload that request-level batching does not reach."""
    crowded = case.scaled(OVERLOAD)
    ours = run(crowded, load("kaiseki", gives_up=False))["output_tokens_per_s"]
    theirs = run(crowded, load("static"))["output_tokens_per_s"]
    return 1.0 - theirs / ours if ours else None


def _verdict(pays: bool, best: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    budget = "" if usual["budget_tokens"] is None else f" at its best budget, {usual['budget_tokens']} tokens"
    compared = (
        f"{best['attainment']:.1%} of the requests attain their targets, against {usual['attainment']:.1%} "
        f"under {usual['policy']}{budget}"
    )
    on = f"on {best['cluster']} with a quantum of {best['quantum_tokens']} tokens"
    return f"Token-level scheduling {'pays' if pays else 'does not pay'} here: {on}, {compared}."


def _reasons(
    found: Traffic, best: Mapping[str, Any], usual: Mapping[str, Any], gap: float | None
) -> list[dict[str, Any]]:
    tight = found.tightest_ttft_ms
    price, other = best["usd_per_million_output_tokens"], usual["usd_per_million_output_tokens"]
    return [
        {
            "name": "a TTFT target below 500 ms",
            "holds": tight is not None and tight < TIGHT_TTFT_MS,
            "value": tight,
            "detail": "no request has one" if tight is None else f"the tightest is {tight:.0f} ms",
        },
        {
            "name": "requests with different targets",
            "holds": found.kinds > 1,
            "value": found.kinds,
            "detail": f"{found.kinds} different sets of targets",
        },
        {
            "name": "a long tail of more than 5 %",
            "holds": found.long_share > LONG_TAIL,
            "value": found.long_share,
            "detail": f"{found.long_share:.1%} of prompts are over {LONG_OVER_MEDIAN:.0f} times the median",
        },
        {
            "name": "capacity that request-level batching leaves unused",
            "holds": gap is not None and gap > 0.0,
            "value": gap,
            "detail": "not measurable"
            if gap is None
            else f"at {OVERLOAD:.0f} times the rate it emits {gap:.0%} fewer tokens/s",
        },
        {
            "name": "price per million output tokens",
            "holds": price is not None and other is not None and price <= other,
            "value": price,
            "detail": "nothing was produced"
            if price is None or other is None
            else f"{price:.2f} USD, against {other:.2f} under {usual['policy']}",
        },
    ]
