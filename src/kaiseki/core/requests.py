"""What a caller submits: a request, its service class and its targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

NEVER_NS = 2**62
"""A time that never comes; used where an SLO has no such target."""


class OnLate(IntEnum):
    """What becomes of a request that can no longer meet its SLO."""

    KEEP = 0
    DEMOTE = 1
    EXPIRE = 2


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Targets shared by the requests of a class; a target that is None does not apply.

    Attributes:
        name: label for metrics and explanations.
        ttft_ns: arrival to first token, nanoseconds.
        tbt_ns: between two consecutive tokens, nanoseconds.
        deadline_ns: arrival to last token, nanoseconds.
        weight: worth of one attained request relative to others; > 0.
        on_late: what happens to a request whose targets can no longer be met.
        tier: vLLM-style priority, lower is sooner; only policies that order by it look at it.
    """

    name: str = "default"
    ttft_ns: int | None = None
    tbt_ns: int | None = None
    deadline_ns: int | None = None
    weight: float = 1.0
    on_late: OnLate = OnLate.DEMOTE
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Begun:
    """What a request did on the replicas that it was on before.

    Attributes:
        first_token_ns: when its first token came there.
        demoted: whether it had become best effort.
        outputs: how many tokens it has.
        last_token_ns: when the last of them came; None where it is the first.
        late_gaps: how many of the gaps between them were late.
        sent: whether the KV of all but the last of them comes along; otherwise it is computed anew.
    """

    first_token_ns: int
    demoted: bool = False
    outputs: int = 1
    last_token_ns: int | None = None
    late_gaps: int = 0
    sent: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to schedule. Only lengths and hashes: the core never sees text or token ids.

    Attributes:
        id: unique while the request is open.
        prompt_tokens: prompt length, tokens, >= 1.
        max_tokens: most output tokens, >= 1.
        min_tokens: output tokens that will be produced for certain (`ignore_eos` makes it max_tokens).
        tenant: who is charged.
        cls: service class.
        arrival_ns: when the client's request reached us.
        priority: vLLM polarity, lower is sooner; added to the class's tier.
        block_hashes: chained SHA-256 digest of each *full* prompt block, for prefix reuse.
        fork_of: id of the sibling whose prompt this one shares (n > 1 sampling), or None.
        ttft_ns: target of this request in place of its class's, nanoseconds, or None.
        hands_over: when it has its tokens, its KV stays until `Scheduler.handed_over`, for another replica.
        begun: set where a request goes on that has tokens from another replica.
        adapter: name of the LoRA adapter it runs with, or None for the base model. KV depends on it, so
            `block_hashes` must be salted with it.
    """

    id: str
    prompt_tokens: int
    max_tokens: int
    tenant: str = "default"
    cls: ServiceClass = field(default_factory=ServiceClass)
    arrival_ns: int = 0
    min_tokens: int = 1
    priority: int = 0
    block_hashes: tuple[bytes, ...] = ()
    fork_of: str | None = None
    ttft_ns: int | None = None
    hands_over: bool = False
    begun: Begun | None = None
    adapter: str | None = None

    def without_digests(self) -> Request:
        """The same request without `block_hashes`, which may be by far the largest part of it."""
        return Request(
            self.id, self.prompt_tokens, self.max_tokens, self.tenant, self.cls, self.arrival_ns,
            self.min_tokens, self.priority, (), self.fork_of, self.ttft_ns,
            self.hands_over, self.begun, self.adapter,
        )  # fmt: skip

    @property
    def ttft_target_ns(self) -> int | None:
        """Arrival to first token, nanoseconds: its own target, else its class's."""
        return self.cls.ttft_ns if self.ttft_ns is None else self.ttft_ns
