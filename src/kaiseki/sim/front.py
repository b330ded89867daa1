"""What stands before the fleet: routers that know of replicas what these said last."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kaiseki.core.requests import Request
from kaiseki.sim.cluster import Routers
from kaiseki.sim.handover import Handover
from kaiseki.sim.replica import SimReplica
from kaiseki.sim.routers import ROUTERS, Load


class Seen:
    """A replica as routers see it; see `routers.Worker`."""

    def __init__(self, replica: SimReplica, handover: Handover | None) -> None:
        self._replica = replica
        self._pool = replica.description.pool
        self._kv_bytes = replica.description.deployment.model.kv_bytes_per_token
        self._handover = handover if self._pool.role == "prefill" else None
        self._said: Load | None = None
        self.away_ns = 0

    def hears(self, load: Load) -> None:
        """This is what routers know until the next time."""
        self._said = load

    def load(self) -> Load:
        """What it said last; how things are, if it never did."""
        return self._replica.load() if self._said is None else self._said

    def cached_tokens(self, request: Request) -> int:
        """The directory hears of each block at once."""
        return self._replica.cached_tokens(request)

    def step_ns(self, decodes: int, context_tokens: int) -> float:
        return self._replica.step_ns(decodes, context_tokens)

    def sending_ns(self, request: Request) -> float:
        if self._handover is None:
            return float(self.away_ns)
        return self.away_ns + self._handover.sending_ns(
            self._pool.name, request.prompt_tokens, self._kv_bytes
        )


class Front:
    """Several routers of one kind; each request comes to any of them.

    Args:
        name: a key of `ROUTERS`.
        seed: of whatever is drawn.
        section: how many, and how stale their knowledge is.
        replicas: the fleet.
        handover: what says how busy links are, if there are any.
        delay_ms: how long a report is on its way.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        section: Routers,
        replicas: Sequence[SimReplica],
        handover: Handover | None = None,
        delay_ms: float = 0.0,
    ) -> None:
        self._replicas = replicas
        self._delay_ns = round(delay_ms * 1e6)
        self._reports: deque[tuple[int, list[Load]]] = deque()
        self._routers = [ROUTERS[name](seed + i, section.count) for i in range(section.count)]
        self._rng = np.random.default_rng(seed)
        self._refresh_ns = round(section.refresh_ms * 1e6)
        self._report_ns = 0
        self._seen = [Seen(replica, handover) for replica in replicas]

    def choose(
        self, request: Request, may: Sequence[int], now: int, away_ns: Sequence[int] | None = None
    ) -> int:
        """Which of the replicas that may take a request gets it; `away_ns` is what the way to each adds."""
        if len(may) == 1:
            return may[0]
        if self._refresh_ns and now >= self._report_ns:
            self._report_ns = (now // self._refresh_ns + 1) * self._refresh_ns
            self._reports.append((now + self._delay_ns, [replica.load() for replica in self._replicas]))
        while self._reports and self._reports[0][0] <= now:
            for seen, load in zip(self._seen, self._reports.popleft()[1], strict=True):
                seen.hears(load)
        if away_ns is not None:
            for i in may:
                self._seen[i].away_ns = away_ns[i]
        router = self._routers[int(self._rng.integers(len(self._routers)))]
        return may[router(request, [self._seen[i] for i in may])]
