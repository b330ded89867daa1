"""Settings of the scheduling core (B13), as plain data; the YAML layer validates and fills them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What the core can be told.

    Attributes:
        max_batch_size: most requests that run at once.
        timeout_ms: a decision that would take longer is cut (the driver turns it into a work limit).
        fairness_window: how many mean slots of service a tenant may be ahead of the one furthest behind.
        watermark_ratio: new work is admitted only while live blocks <= ratio * pool.
        quantum_tokens: prefill chunks are multiples of this unless they complete the prompt.
        decide_share: where deciding takes a larger part of the slot than this, the quantum grows.
        max_slot_tokens: most tokens in one slot.
        window: most waiting candidates looked at in one slot.
        max_passes: a candidate passed over this often is taken first as soon as it is feasible.
        max_waiting: most requests that may wait; 0 is no limit.
        max_waiting_tokens: most prompt tokens that may wait; 0 is no limit.
        slo_lambda: worth of one attained request of weight 1, in seconds of card time (lambda of A2).
        kv_mu: worth of one KV block without wasted room, in seconds of card time (mu of A2).
    """

    max_batch_size: int = 1024
    timeout_ms: float = 50.0
    fairness_window: int = 100
    watermark_ratio: float = 0.8
    quantum_tokens: int = 16
    decide_share: float = 0.2
    max_slot_tokens: int = 8192
    window: int = 64
    max_passes: int = 64
    max_waiting: int = 0
    max_waiting_tokens: int = 0
    slo_lambda: float = 1.0
    kv_mu: float = 0.0
