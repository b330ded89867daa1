"""One simulated replica that is given requests one by one, with what became of each."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import numpy as np

from kaiseki.core.applying import Applied
from kaiseki.core.decision import StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.policy import Policy
from kaiseki.core.requests import Request, ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.engines.clock import VirtualClock
from kaiseki.policies.registry import load
from kaiseki.sim import cluster
from kaiseki.sim.arrivals import Arrival
from kaiseki.sim.cluster import Replica, Routers
from kaiseki.sim.engine import Work
from kaiseki.sim.front import Front
from kaiseki.sim.loop import Simulation
from kaiseki.sim.replica import SimReplica

MS, S = 10**6, 10**9


def ask(name: str, prompt: int, outputs: int, at_ns: int = 0, **more: object) -> Request:
    """A request that gives so many tokens for certain."""
    return Request(name, prompt, outputs, arrival_ns=at_ns, min_tokens=outputs, **more)  # type: ignore[arg-type]


class Given:
    """Requests of a list, as the loop takes them from a stream."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._left = deque(sorted(requests, key=lambda r: r.arrival_ns))

    def next_ns(self) -> int | None:
        return self._left[0].arrival_ns if self._left else None

    def pop(self) -> Arrival:
        request = self._left.popleft()
        return Arrival(len(self._left), request, Work(request.prompt_tokens, request.max_tokens), 0)

    def ended(self, position: int, now: int, followers: int) -> None:
        pass


class Simulated:
    """A run of llama-3-8b on one H100.

    Attributes:
        ended: how each request ended.
        refused: reason and numbers of those that were refused.
        times_ns: when each token of each request came.
        slots: (end, counters of tenants) after each step.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        policy: str | Policy = "kaiseki",
        pool: str = "",
        change: Callable[[Replica], Replica] = lambda about: about,
        **settings: object,
    ) -> None:
        text = f"model: llama-3-8b\npools: [{{name: a, card: h100, {pool}}}]"
        about = change(cluster.fleet(cluster.parse(text))[0])
        limits = {"max_batch_size": about.pool.max_batch_size, **settings}
        made = load(policy) if isinstance(policy, str) else policy
        classes: list[ServiceClass] = list(dict.fromkeys(r.cls for r in requests))
        clock = VirtualClock()
        self.replica = SimReplica(about, made, SchedulerSettings(**limits), classes, {}, clock)  # type: ignore[arg-type]
        self.times_ns: dict[str, list[int]] = defaultdict(list)
        self.slots: list[tuple[int, np.ndarray]] = []
        self.longest_slot_ns = 0
        self.replica.scheduler.apply = self._noting(self.replica.scheduler.apply)  # type: ignore[method-assign]
        front = Front("random", 1, Routers(), [self.replica])
        log = Simulation(Given(requests), [self.replica], front, clock).run()  # type: ignore[arg-type]
        self.ended: dict[str, Ending] = {r.id: ending for r, ending in log.endings}
        self.refused = {r.id: refusal for r, refusal in log.refusals}
        self.preemptions = sum(e.preemptions for e in self.ended.values())
        assert len(self.ended) + len(self.refused) == len(requests)
        self.replica.kv.check()
        assert self.replica.kv.free_blocks() == self.replica.kv.total_blocks

    def _noting(self, apply: Callable[[StepResult], Applied]) -> Callable[[StepResult], Applied]:
        def noted(result: StepResult) -> Applied:
            names = [self.replica.scheduler.life.names.get(row, "") for row in result.rows.tolist()]
            applied = apply(result)
            for name, emitted in zip(names, applied.emitted.tolist(), strict=True):
                if emitted:
                    self.times_ns[name].append(result.ended_ns)
            self.longest_slot_ns = max(self.longest_slot_ns, result.ended_ns - result.started_ns)
            self.slots.append((result.ended_ns, self.replica.scheduler.fairness.counter.copy()))
            return applied

        return noted

    def ttft_ns(self, name: str) -> int:
        return self.times_ns[name][0] - self.ended[name].arrival_ns

    def gaps_ns(self, name: str) -> list[int]:
        return np.diff(self.times_ns[name]).tolist()

    def took_ns(self, name: str) -> int:
        return self.ended[name].ended_ns - self.ended[name].arrival_ns
