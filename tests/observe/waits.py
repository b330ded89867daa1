"""How long each request of a bench waits, seen from its decisions and table, not from its records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tests.harness import Bench

from kaiseki.core.decision import Decision, StepResult
from kaiseki.core.table import State

HAS_NOTHING = (State.WAITING, State.HELD)


class Watch:
    """Adds up, by request, the time in which it could have used a chunk and had none.

    After each decision every open request either has a chunk (in it, or still in flight so that there is
    nothing more to compute) or waits until the next one. An engine error that is retried makes it wait
    from the end of the step.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.total: dict[str, int] = {}
        self.since: dict[str, int] = {}
        self._seen: set[str] = set()
        s: Any = bench.scheduler
        self._decide: Callable[..., Decision] = s.decide
        self._apply: Callable[[StepResult], Any] = s.apply
        s.decide, s.apply = self.decide, self.apply

    def decide(self, now: int, *more: Any, **named: Any) -> Decision:
        decision = self._decide(now, *more, **named)
        table, given = self.bench.scheduler.table, set(decision.rows.tolist())
        for row, name in self.bench.scheduler.life.names.items():
            if name not in self._seen:
                self._seen.add(name)
                self.since[name] = int(table.arrival_ns[row])
            if row not in given and (table.state[row] in HAS_NOTHING or self._could_use(row)):
                self.since.setdefault(name, now)
            else:
                self._ends(name, now)
        return decision

    def _could_use(self, row: int) -> bool:
        t, caps = self.bench.scheduler.table, self.bench.engine.capabilities
        out = int(t.outputs[row] + t.pending[row])
        free = caps.placeholders or t.inflight_slot[row] < 0
        return bool(free and out < t.max_tokens[row] and t.prompt[row] + out > t.computed[row])

    def _ends(self, name: str, now: int) -> None:
        since = self.since.pop(name, None)
        if since is not None:
            self.total[name] = self.total.get(name, 0) + now - since

    def apply(self, result: StepResult) -> Any:
        scheduler = self.bench.scheduler
        ran = [r for r in result.rows.tolist() if scheduler.table.state[r] == State.RUNNING]
        names = {r: scheduler.life.names[r] for r in ran}
        applied = self._apply(result)
        for row, name in names.items():
            if scheduler.life.names.get(row) == name and scheduler.table.state[row] == State.WAITING:
                self.since.setdefault(name, result.ended_ns)
        return applied

    def wait_ns(self, name: str) -> int:
        """All of the waiting of a request that has ended."""
        story = self.bench.driver.history.story(name)
        assert story is not None and story.ending is not None
        begun = self.since.get(name) if name in self._seen else story.request.arrival_ns
        last = story.ending.ended_ns - begun if begun is not None else 0
        return self.total.get(name, 0) + max(last, 0)


def longest_slot_ns(bench: Bench) -> int:
    """The longest step so far."""
    took = np.array([r.ended_ns - r.started_ns for r in bench.engine.results] or [0])
    return int(took.max())
