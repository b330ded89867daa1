"""An `Engine` that notes what each step computed and how long it took, to fit step times to."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Decision, StepResult
from kaiseki.core.protocols import N_FEATURES, Capabilities, Engine
from kaiseki.core.table import RequestTable
from kaiseki.cost.features import chunk_features


class Steps(NamedTuple):
    """Steps that were measured, in order.

    Attributes:
        features: float64[n, N_FEATURES].
        took_ns: int64[n], by the engine's own account.
        turn_ns: int64[n], from when the engine could have begun (it had the decision, and the step before
            had ended) to the end: with what passes between steps.
        ended_ns: int64[n].
    """

    features: F64
    took_ns: I64
    turn_ns: I64
    ended_ns: I64


class LoggedEngine:
    """Hands everything on to another engine, and takes notes.

    Args:
        engine: does the work.
        table: of the scheduler that decides, to tell decodes from prefill chunks.
    """

    def __init__(self, engine: Engine, table: RequestTable) -> None:
        self._engine = engine
        self._table = table
        self._outstanding: deque[tuple[F64, int]] = deque()
        self._features: list[F64] = []
        self._times: list[tuple[int, int, int]] = []  # took, turn, ended
        self._last_end_ns = 0

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine`."""
        return self._engine.capabilities

    def open(self, row: int, work: Any) -> None:
        """See `Engine`."""
        self._engine.open(row, work)

    def close(self, row: int) -> None:
        """See `Engine`."""
        self._engine.close(row)

    def execute(self, decision: Decision) -> None:
        """See `Engine`."""
        features = features_of(decision, self._table.prompt[decision.rows])
        self._outstanding.append((features, time.monotonic_ns()))
        self._engine.execute(decision)

    def collect(self) -> StepResult:
        """See `Engine`. A step in which something failed is not noted: it is none of those to come."""
        result = self._engine.collect()
        features, handed_ns = self._outstanding.popleft()
        if not result.failed.any():
            begin = max(handed_ns, self._last_end_ns)
            took, turn = result.ended_ns - result.started_ns, result.ended_ns - begin
            self._features.append(features)
            self._times.append((took, turn, result.ended_ns))
        self._last_end_ns = result.ended_ns
        return result

    def steps(self) -> Steps:
        """What was noted so far."""
        features = np.array(self._features).reshape(-1, N_FEATURES)
        took, turn, ended = np.array(self._times, np.int64).reshape(-1, 3).T
        return Steps(features, took, turn, ended)


def features_of(decision: Decision, prompts: I32) -> F64:
    """float64[N_FEATURES] of a decision, whose rows have prompts of int32[n] tokens."""
    decodes = (decision.tokens == 1) & (decision.starts >= prompts)
    chunks = ~decodes
    return chunk_features(decision.starts[decodes] + 1, decision.starts[chunks], decision.tokens[chunks])
