"""Settings that work against their purpose, told from what a server with our scheduler measures."""

from __future__ import annotations

import math

from kaiseki.observe.doctor.case import Case, Finding, Rule, ms
from kaiseki.observe.doctor.symptoms import PROMPT

NO_TARGETS = ("fcfs", "static", "orca", "sarathi", "srpt", "vtc", "lpm")
"""Policies that look at no SLO."""
BUDGETED = ("fcfs", "priority", "sarathi", "orca", "static", "edf", "srpt", "vtc", "lpm")
"""Policies whose slots end at `scheduling.budget_tokens`."""


def costly_decisions(case: Case) -> Finding | None:
    """Deciding eats more of the slots than it may."""
    r = case.readings
    decide, slot = r.grew("kaiseki_decide_seconds_sum"), r.grew("kaiseki_slot_seconds_sum")
    share = case.settings.get("scheduling", {}).get("decide_share", 0.2)
    if slot <= 0 or r.grew("kaiseki_slot_seconds_count") < 20 or decide / slot <= share:
        return None
    quantum = case.settings.get("scheduling", {}).get("quantum_tokens")
    return Finding(
        "quantum_too_fine",
        "The scheduler takes a large part of each slot",
        "slots are so short that deciding them costs as much as computing them"
        + (f" (quantum {quantum} tokens)" if quantum else ""),
        f"{decide:.2f} s deciding in {slot:.2f} s of slots ({decide / slot:.0%}, {share:.0%} allowed)",
        "a coarser scheduling.quantum_tokens, a looser TBT, or a smaller scheduling.window",
    )


def targets_ignored(case: Case) -> Finding | None:
    """Classes have targets, and the policy looks at none."""
    policy = case.settings.get("scheduling", {}).get("policy")
    named = [name for name, c in case.settings.get("classes", {}).items()
             if any(c.get(k) is not None for k in ("ttft_ms", "tbt_ms", "deadline_s"))]  # fmt: skip
    if policy not in NO_TARGETS or not named:
        return None
    return Finding(
        "targets_ignored",
        "Classes miss targets that nobody works for",
        f"policy {policy} looks at no target",
        f"scheduling.policy {policy}; targets in classes {', '.join(named)}",
        "scheduling.policy kaiseki (or edf), or take the targets out",
    )


def budget_ignored(case: Case) -> Finding | None:
    """A budget is set, and the policy sizes slots by time."""
    scheduling = case.settings.get("scheduling", {})
    if scheduling.get("budget_tokens") is None or scheduling.get("policy") in (*BUDGETED, None):
        return None
    return Finding(
        "budget_ignored",
        "A setting has no effect",
        f"policy {scheduling['policy']} sizes its slots by the tightest TBT and not by a budget",
        f"scheduling.budget_tokens {scheduling['budget_tokens']}, scheduling.policy {scheduling['policy']}",
        "take budget_tokens out; scheduling.max_slot_tokens limits a slot under every policy",
    )


def tau_too_low(case: Case) -> Finding | None:
    """A tau under which weights move deadlines by less than a slot lasts."""
    scheduling = case.settings.get("scheduling", {})
    tau_ms = scheduling.get("policy_settings", {}).get("tau_ms")
    weights = [c.get("weight", 1.0) for c in case.settings.get("classes", {}).values()]
    slot = case.readings.quantile("kaiseki_slot_seconds", 0.5)
    if tau_ms is None or len(set(weights)) < 2 or slot is None:
        return None
    moved = tau_ms / 1e3 * math.log(max(weights) / min(weights))
    if moved >= slot:
        return None
    return Finding(
        "tau_too_low",
        "Weights of classes make no difference",
        "a weight moves a deadline by tau times its logarithm, which is less than one slot",
        f"tau_ms {tau_ms:g}, weights {min(weights):g} to {max(weights):g}: {ms(moved)}, a slot lasts "
        f"{ms(slot)}",
        "raise policy_settings.tau_ms to what a step of weight should be worth in deadline",
    )


def queue_limit(case: Case) -> Finding | None:
    """The queue takes more than can be prefilled in time, or so little that the card idles."""
    r, scheduling = case.readings, case.settings.get("scheduling", {})
    limit, seconds = scheduling.get("max_waiting_tokens"), r.seconds
    targets = sorted(case.targets_s("ttft_ms").values())
    if limit is None or seconds is None or not targets:
        return None
    rate = r.grew(PROMPT) / seconds
    expired = r.grew("kaiseki_requests_total", outcome="expired")
    full = r.grew("kaiseki_refusals_total", reason="queue_full")
    waiting = r.gauge("vllm:num_requests_waiting") or 0
    if rate > 0 and waiting and expired > 0 and (limit == 0 or limit / rate > 2 * targets[-1]):
        allowed = "no limit" if limit == 0 else f"{limit} tokens, {ms(limit / rate)} of prefill"
        return Finding(
            "queue_limit_too_high",
            "Requests wait and then expire",
            "more is queued than can be prefilled before its target, so it is refused late and not at once",
            f"scheduling.max_waiting_tokens: {allowed}; {rate:.0f} prompt tokens/s, loosest TTFT"
            f" {ms(targets[-1])}, {expired:.0f} expired",
            f"scheduling.max_waiting_tokens about {rate * targets[-1]:.0f}, so that clients hear at once",
        )
    if full > 0 and limit and rate > 0 and limit / rate < targets[0] / 4:
        return Finding(
            "queue_limit_too_low",
            "Requests are refused that could have been served in time",
            "the queue holds less than a quarter of what is prefilled within the tightest target",
            f"scheduling.max_waiting_tokens {limit}, {rate:.0f} prompt tokens/s, {full:.0f} refused as "
            "queue_full",
            f"scheduling.max_waiting_tokens about {rate * targets[-1]:.0f}",
        )
    return None


RULES: tuple[Rule, ...] = (costly_decisions, targets_ignored, budget_ignored, tau_too_low, queue_limit)
