"""What a driver says of itself: whether it makes progress, and how things stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kaiseki.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the driver makes progress.

    Attributes:
        ok: false when it does not.
        code: which kind of trouble, for machines; empty when ok.
        reason: why, in words; empty when ok.
        last_progress_age_s: since a slot was finished, or nothing was left to do.
        retry_after_s: when trying again makes sense, for what may pass by itself.
        slot, running, waiting: where it stands; requests not looked at yet are waiting too.
    """

    ok: bool
    reason: str
    last_progress_age_s: float
    slot: int
    running: int
    waiting: int
    code: str = ""
    retry_after_s: float | None = None


def state_of(scheduler: Scheduler, draining: bool, posted: int) -> dict[str, Any]:
    """The state document: queues, tenants, KV, policy. `posted` requests have not been looked at yet."""
    s, f, t = scheduler, scheduler.fairness, scheduler.table
    running = np.bincount(t.tenant[t.running_rows()], minlength=len(f.names))
    return {
        "slot": s.life.slot,
        "policy": s.policy.name,
        "running": t.running_count,
        "waiting": len(s.waiting),
        "posted": posted,
        "open": t.open_rows,
        "draining": draining,
        "tenants": {
            name: {
                "service_s": f.counter[i] / 1e9,
                "weight": f.weight[i],
                "running": int(running[i]),
                "waiting": s.waiting.count(i),
            }
            for i, name in enumerate(f.names)
        },
        "kv": {
            "total_blocks": s.kv.total_blocks,
            "free_blocks": s.kv.free_blocks(),
            "live_blocks": s.kv.live_blocks(),
            "block_tokens": s.kv.block_tokens,
        },
    }
