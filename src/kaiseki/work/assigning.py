"""Give the requests of a stream their tenants, classes and TTFT targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kaiseki.core.requests import NEVER_NS
from kaiseki.work import conditions
from kaiseki.work.batches import F64, I32, I64, NONE, Batch, Bool
from kaiseki.work.classes import Plan
from kaiseki.work.conditions import Condition
from kaiseki.work.scattering import scattered

LonePrefill = Callable[[I32], F64]
"""Seconds, float64[n], that prompts of int32[n] tokens take alone on an idle replica with nothing cached."""

SESSIONS_FROM = np.int64(2**62)
"""Keeps the numbers of sessions apart from positions in the stream when shares are drawn."""


class Assigner:
    """Applies a classes file; what a request gets depends on it, its session and the seed alone."""

    def __init__(self, plan: Plan, lone_prefill_s: LonePrefill, seed: int = 0) -> None:
        """Prepare the rules.

        Args:
            plan: the classes file.
            lone_prefill_s: asked for classes with `ttft_per_lone`.
            seed: for shares.
        """
        self._lone_prefill_s = lone_prefill_s
        self._seed = seed
        self._rules: list[tuple[float | None, Condition | None, int, int]] = [
            (
                rule.share,
                None if rule.when is None else conditions.parse(rule.when),
                plan.class_names().index(plan.class_of(rule)),
                plan.tenant_names().index(rule.tenant),
            )
            for rule in plan.assign
        ]
        classes = plan.service_classes()
        per_lone = [plan.traced_class(cls.name).ttft_per_lone for cls in classes]
        self._ttft_ns = np.array([NEVER_NS if cls.ttft_ns is None else cls.ttft_ns for cls in classes])
        self._per_lone = np.array([value or 0.0 for value in per_lone])

    def stream(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same requests, assigned."""
        return map(self.assign, batches)

    def assign(self, batch: Batch) -> Batch:
        """A batch with `class_index`, `tenant_index` and `ttft_ns`."""
        class_index = np.zeros(len(batch), np.int16)
        tenant_index = np.zeros(len(batch), np.int16)
        left: Bool = np.ones(len(batch), np.bool_)
        for number, (share, condition, cls, tenant) in enumerate(self._rules):
            taken = left.copy()
            if condition is not None:
                taken &= condition.holds(batch)
            if share is not None:
                taken &= self._uniform(batch, number) < share
            class_index[taken] = cls
            tenant_index[taken] = tenant
            left &= ~taken
        ttft_ns = self._targets(batch, class_index)
        return replace(batch, class_index=class_index, tenant_index=tenant_index, ttft_ns=ttft_ns)

    def _targets(self, batch: Batch, class_index: npt.NDArray[np.int16]) -> I64:
        """int64[n]: TTFT targets, nanoseconds."""
        ttft_ns = self._ttft_ns[class_index]
        grows = np.flatnonzero(self._per_lone[class_index])
        if len(grows):
            lone_s = self._lone_prefill_s(batch.prompt_tokens[grows])
            least_ns = np.ceil(self._per_lone[class_index[grows]] * lone_s * 1e9).astype(np.int64)
            ttft_ns[grows] = np.maximum(ttft_ns[grows], least_ns)
        return ttft_ns

    def _uniform(self, batch: Batch, rule: int) -> F64:
        """float64[n] in [0, 1): drawn for each session, or request on its own, and each rule."""
        session = batch.follow.session
        position = np.arange(batch.first, batch.first + len(batch))
        who = np.where(session == NONE, position, session + SESSIONS_FROM).astype(np.uint64)
        start = np.random.SeedSequence((self._seed, rule)).generate_state(1, np.uint64)
        return (scattered(scattered(who) + start) >> np.uint64(11)) * np.float64(2.0**-53)
