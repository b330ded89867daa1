"""From prefill to decode: prompts are computed on one replica, their KV moves, another one goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kaiseki.core.admission import Refusal
from kaiseki.core.endings import Ending
from kaiseki.core.reasons import Outcome
from kaiseki.core.requests import Begun, Request
from kaiseki.sim.cluster import Links
from kaiseki.sim.engine import Work
from kaiseki.sim.links import Link, Transfer
from kaiseki.sim.lives import Left
from kaiseki.sim.replica import SimReplica


@dataclass(slots=True)
class _Half:
    """A request whose prompt is computed.

    Attributes:
        request: the whole one.
        ending: of its first part.
        source: replica that computed its prompt.
        transfer: of its KV.
        target: replica that goes on, once it is chosen.
    """

    request: Request
    ending: Ending
    source: int
    transfer: Transfer
    target: int = -1


class Handover:
    """Requests between the two parts of their life.

    KV stays where it was computed until it has landed, and leaves only when its place is reserved. It waits
    in the order in which prompts were done, one queue per prefill pool, for a decode replica that has room
    and to whose pool the link has a slot; of several, the one with the fewest open requests is taken.

    Args:
        replicas: of all roles.
        section: what each link is like.
    """

    def __init__(self, replicas: Sequence[SimReplica], section: Links) -> None:
        self._replicas = replicas
        self._decoders = [i for i, r in enumerate(replicas) if r.description.pool.role == "decode"]
        self._halves: dict[str, _Half] = {}
        sources = {
            r.description.pool.name: r.description.site
            for r in replicas
            if r.description.pool.role == "prefill"
        }
        targets = {
            r.description.pool.name: r.description.site for r in map(replicas.__getitem__, self._decoders)
        }
        self._queues: dict[str, deque[_Half]] = {name: deque() for name in sources}
        self.links = {
            (a, b): Link(section)
            for a, site in sources.items()
            for b, other in targets.items()
            if site == other  # KV does not leave its cluster
        }

    def refuses(self, request: Request) -> Refusal | None:
        """Why no decode replica could ever finish a request, if so."""
        refusal = None
        for i in self._decoders:
            refusal = self._replicas[i].never_runs(request)
            if refusal is None:
                return None
        return refusal

    def first_part(self, request: Request) -> Request:
        """What a prefill replica is asked for: one token; a request that lacks only that is done there."""
        upto = 1 if request.begun is None else request.begun.outputs + 1
        return replace(request, max_tokens=upto, min_tokens=upto, hands_over=request.max_tokens > upto)

    def sending_ns(self, pool: str, prompt_tokens: int, bytes_per_token: float) -> float:
        """Predicted time until KV of a prefill pool would have landed, behind all that waits there."""
        links = [link for (source, _), link in self.links.items() if source == pool]
        queued = sum(half.transfer.size_bytes for half in self._queues[pool])
        budget = sum(link.budget for link in links)
        under_way = sum(link.backlog_ns * link.budget for link in links)
        return (queued + under_way + prompt_tokens * bytes_per_token) / budget

    def takes(self, request: Request, ending: Ending, source: int) -> bool:
        """Whether an ending on a replica is only that of the first part, and if so take the request over."""
        replica = self._replicas[source]
        is_first = replica.description.pool.role == "prefill" and request.max_tokens > ending.outputs
        if not is_first or ending.outcome != Outcome.COMPLETED:
            return False
        replica.keep()
        tokens = request.prompt_tokens + ending.outputs - 1
        size = tokens * replica.description.deployment.model.kv_bytes_per_token
        half = _Half(request, ending, source, Transfer(request.id, size, ending.ended_ns))
        self._halves[request.id] = half
        self._queues[replica.description.pool.name].append(half)
        return True

    def whole(self, ending: Ending) -> Ending:
        """One ending of a request's whole life from that of its last part."""
        half = self._halves.pop(ending.request_id, None)
        if half is None:
            return ending
        first = half.ending
        return ending._replace(
            admitted_ns=first.admitted_ns,
            cached=first.cached,
            preemptions=first.preemptions + ending.preemptions,
            recomputed=first.recomputed + ending.recomputed,
            service_ns=first.service_ns + ending.service_ns,
        )

    def lose(self, failed: int) -> list[Left]:
        """A replica fails. Returns the first parts of requests that have to begin again.

        That are those which it decoded, and those whose KV it held or got. Whoever has the other part of
        their KV forgets it.
        """
        lost = []
        for half in list(self._halves.values()):
            moving = half.transfer.landed_ns < 0
            if half.target != failed and not (half.source == failed and moving):
                continue
            lost.append(Left.of_part(half.ending, lost=moving))
            del self._halves[half.request.id]
            pool = self._replicas[half.source].description.pool.name
            if half.target < 0:
                self._queues[pool].remove(half)
            elif moving:
                target = self._replicas[half.target]
                self.links[pool, target.description.pool.name].cancel(half.transfer)
                if half.target != failed:
                    target.withdraw(half.request.id)
                else:
                    self._replicas[half.source].handed_over(half.request.id)
        return lost

    def next_ns(self) -> int | None:
        """When something happens on a link next."""
        times = (link.next_ns() for link in self.links.values())
        return min((due for due in times if due is not None), default=None)

    def advance(self, now: int) -> Iterator[int]:
        """Let time pass on the links. Gives the replicas that have KV or room since."""
        for link in self.links.values():
            for transfer in link.advance(now):
                half = self._halves[transfer.request_id]
                self._replicas[half.source].handed_over(transfer.request_id)
                self._replicas[half.target].landed(transfer.request_id)
                yield half.source
                yield half.target

    def start(self, now: int) -> None:
        """Begin the transfers that can begin."""
        for pool, queue in self._queues.items():
            while queue and (target := self._target(pool, queue[0])) is not None:
                half = queue.popleft()
                half.target = target
                replica = self._replicas[target]
                work = Work(half.request.prompt_tokens, half.request.max_tokens - half.ending.outputs)
                refusal = replica.submit(self._last_part(half), work)
                assert refusal is None, "whoever has room takes it"
                self.links[pool, replica.description.pool.name].start(half.transfer, now)

    def _target(self, pool: str, half: _Half) -> int | None:
        """The decode replica that takes it now: fewest open requests first, then most free blocks."""
        part = self._last_part(half)
        can = [
            i
            for i in self._decoders
            if self._replicas[i].up
            and (link := self.links.get((pool, self._replicas[i].description.pool.name))) is not None
            and link.can_start()
            and self._replicas[i].scheduler.has_room(part)
        ]
        chosen = self._replicas
        return min(can, key=lambda i: (chosen[i].open_requests, -chosen[i].kv.free_blocks()), default=None)

    def _last_part(self, half: _Half) -> Request:
        first = half.ending
        begun = Begun(first.first_token_ns, first.demoted, first.outputs, first.ended_ns, first.late_gaps)
        return replace(half.request, begun=begun)
