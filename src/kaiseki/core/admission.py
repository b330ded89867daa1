"""What is refused at submit, and with which figures; what may be sent here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kaiseki.core.policy import Policy
from kaiseki.core.protocols import Capabilities, KVSpace
from kaiseki.core.queues import Waiting
from kaiseki.core.reasons import Reason
from kaiseki.core.requests import OnLate, Request
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import RequestTable, State


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not taken.

    Attributes:
        reason: the closed enum.
        numbers: the figures behind it, by name.
        retry_after_s: when time can cure it, how long that is expected to take.
    """

    reason: Reason
    numbers: Mapping[str, float] = field(default_factory=dict)
    retry_after_s: float | None = None


def never_runs(request: Request, policy: Policy, capabilities: Capabilities, kv: KVSpace) -> Refusal | None:
    """Refuse what no schedule could finish: with an adapter where the engine loads none, over the model's
    context, over the whole pool, or over a step.

    The last only where prompts are not split. All but its last output token may have to be computed again
    in one piece, with the prompt, after a preemption.
    """
    if request.adapter is not None and capabilities.adapter_slots == 0:
        return Refusal(Reason.NO_ADAPTERS, {"adapter_slots": 0})
    whole = request.prompt_tokens + request.max_tokens
    if whole > capabilities.max_context_tokens:
        numbers = {"tokens": whole, "max_context_tokens": capabilities.max_context_tokens}
        return Refusal(Reason.TOO_LONG, numbers)
    need = _blocks(whole, kv.block_tokens)
    if need > kv.total_blocks:
        pool = kv.total_blocks * kv.block_tokens
        numbers = {"tokens": whole, "pool_tokens": pool, "need_blocks": need, "pool_blocks": kv.total_blocks}
        return Refusal(Reason.NEVER_FITS, numbers)
    if not policy.chunked and whole - 1 > capabilities.max_step_tokens:
        numbers = {
            "tokens": whole - 1,
            "prompt_tokens": request.prompt_tokens,
            "max_step_tokens": capabilities.max_step_tokens,
        }
        return Refusal(Reason.OVER_STEP, numbers)
    return None


def queue_full(
    request: Request, settings: SchedulerSettings, waiting: Waiting, drain_s: float
) -> Refusal | None:
    """Refuse what the queue's limits don't allow; `drain_s` is how long the queue needs to run dry."""
    count, tokens, s = len(waiting), waiting.tokens, settings
    over = s.max_waiting_tokens and tokens + request.prompt_tokens > s.max_waiting_tokens
    if over or (s.max_waiting and count >= s.max_waiting):
        return Refusal(Reason.QUEUE_FULL, {"waiting": count, "waiting_tokens": tokens}, drain_s)
    return None


def has_room(request: Request, table: RequestTable, kv: KVSpace, watermark_ratio: float) -> bool:
    """Whether the KV of a request that has begun elsewhere, and could be finished here, may come now.

    Nobody who could be the champion may find too little room because of KV that came and does not run yet,
    since that cannot be preempted.
    """
    block, total = kv.block_tokens, kv.total_blocks
    outputs = 1 if request.begun is None else request.begun.outputs
    need, whole = _blocks(request.prompt_tokens + outputs, block), request.prompt_tokens + request.max_tokens
    if need > kv.free_blocks():
        return False
    opened = table.records[(table.state != State.FREE) & (table.state != State.GOING)]
    if opened.size == 0:
        return True
    if kv.live_blocks() + need > int(watermark_ratio * total):
        return False
    brought = np.where(opened["brought"], -(-(opened["prompt"] + opened["outputs"]) // block), 0)
    most = -(-(opened["prompt"].astype(np.int64) + opened["max_tokens"]) // block) - brought
    return bool(max(most.max(), _blocks(whole, block) - need) <= total - int(brought.sum()) - need)


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)


def hopeless(request: Request, policy: Policy, rates: tuple[float, float, float]) -> Refusal | None:
    """Refuse what its class would drop later, because even an idle card could not do it in time.

    Requests that may find some of their prompt cached get the benefit of the doubt.
    """
    if not policy.gives_up or request.cls.on_late != OnLate.EXPIRE or request.block_hashes:
        return None
    slot_ns, token_ns, decode_ns = rates
    first = slot_ns + token_ns * request.prompt_tokens
    last = first + max(request.min_tokens - 1, 0) * decode_ns
    for target, least in ((request.ttft_target_ns, first), (request.cls.deadline_ns, last)):
        if target is not None and least > target:
            return Refusal(Reason.HOPELESS, {"least_ms": least / 1e6, "target_ms": target / 1e6})
    return None
