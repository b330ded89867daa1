"""Watching a scheduler's service counters: both sides of the inequalities of docs/fairness.md."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kaiseki.core.fairness import UNMET, Fairness, note_wants
from kaiseki.core.lanes import LANE_WEIGHT, LANES
from kaiseki.core.scheduler import Scheduler

SLOWEST = 1.25
"""Most by which a step of the scripted card takes longer than its formula says."""


@dataclass
class Books:
    """Watches a scheduler's counters: the largest lag, grant, correction and unasked charge so far."""

    scheduler: Scheduler
    hard_lag: float = 0.0
    grant: float = 0.0
    error: float = 0.0
    worst: float = 0.0
    worst_lane: float = 0.0
    unmet_slots: int = 0
    champions: float = 0.0
    lag: float = 0.0
    _champion_waits: int = 0
    _unasked: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        fair, settle, apply = self.scheduler.fairness, self.scheduler.fairness.settle, self.scheduler.apply

        def watched(entries: np.ndarray, waiting: np.ndarray, near: np.ndarray, limits: np.ndarray) -> None:
            settle(entries, waiting, near, limits)
            flags = np.zeros((3, fair.lane_counter.size), np.bool_)
            note_wants(entries, waiting, near, limits, flags, np.zeros((3, fair.counter.size), np.bool_))
            self._look(fair, flags[UNMET])
            self._count_unasked(fair, flags[UNMET])

        def measured(result: object) -> object:
            before = fair.counter.copy(), fair.lane_counter.copy()
            applied = apply(result)  # type: ignore[arg-type]
            for old, new in zip(before, (fair.counter, fair.lane_counter), strict=True):
                self.error = max(self.error, float(np.abs(new[: old.size] - old).max(initial=0.0)))
            return applied

        fair.settle = watched  # type: ignore[method-assign]
        self.scheduler.apply = measured  # type: ignore[method-assign, assignment]

    def _look(self, fair: Fairness, unmet: np.ndarray) -> None:
        flight = self.scheduler._inflight.get(self.scheduler.life.slot)
        self.hard_lag = max(self.hard_lag, fair.hard_lag_ns)
        if flight is not None:
            share = flight.charged / fair.weight[flight.groups // LANES]
            self.grant = max(self.grant, float((share / LANE_WEIGHT[flight.groups % LANES]).max()))
            self._count_champion(flight.decision.rows, share)
        if fair.lag_ns <= 0:
            return
        hungry = unmet.reshape(-1, LANES).any(axis=1)
        busy = fair.open_requests > 0
        if hungry.any() and busy.any():
            self.unmet_slots += 1
            self.worst = max(self.worst, float(fair.counter[busy].max() - fair.counter[hungry].min()))
        lanes = fair.lane_counter.reshape(-1, LANES)
        for tenant in np.flatnonzero(hungry):
            mine, wants = lanes[tenant], unmet.reshape(-1, LANES)[tenant]
            self.worst_lane = max(self.worst_lane, float(mine.max() - mine[wants].min()))

    def _count_champion(self, rows: np.ndarray, share: np.ndarray) -> None:
        if self._champion_waits >= self.scheduler.policy.starving_slots:
            self.champions += float(share[rows == self.scheduler.champion].sum())
        self._champion_waits = self.scheduler._champion_waits

    def _count_unasked(self, fair: Fairness, unmet: np.ndarray) -> None:
        """What decodes charged to lanes that were further than L ahead of one of their tenant's."""
        flight = self.scheduler._inflight.get(self.scheduler.life.slot)
        self.lag = max(self.lag, fair.lag_ns)
        more = fair.lane_counter.size - self._unasked.size
        self._unasked = np.append(self._unasked, np.zeros(more))
        if flight is None:
            return
        d = flight.decision
        decodes = (d.starts >= self.scheduler.table.prompt[d.rows]) & (d.tokens == 1)
        for group, ns in zip(flight.groups[decodes].tolist(), flight.charged[decodes].tolist(), strict=True):
            tenant = group // LANES
            wants = unmet.reshape(-1, LANES)[tenant]
            least = fair.lane_counter.reshape(-1, LANES)[tenant][wants].min(initial=np.inf)
            if fair.lane_counter[group] - least > fair.lag_ns:
                self._unasked[group] += ns / fair.weight[tenant] / LANE_WEIGHT[group % LANES]

    def lane_bound(self, depth: int) -> float:
        """L + G + epsilon + R, as observed, for lanes of a tenant."""
        unasked = SLOWEST * (float(self._unasked.max(initial=0.0)) + self.champions / LANE_WEIGHT.min())
        return self.lag + self.grant + (depth + 1) * self.error + unasked

    def bound(self, depth: int) -> float:
        """H + G + epsilon + R, as observed; a champion's steps may all have taken longer than predicted."""
        return self.hard_lag + self.grant + (depth + 1) * self.error + SLOWEST * self.champions
