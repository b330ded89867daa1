"""From batches of a stream to requests in order of arrival; those with a parent come after it has ended."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kaiseki.core.requests import NEVER_NS, Request, ServiceClass
from kaiseki.sim.engine import Work
from kaiseki.work.batches import NONE, Batch
from kaiseki.work.scattering import scattered

DIGEST_BYTES = 32


class Arrival(NamedTuple):
    """One request to come.

    Attributes:
        position: in the stream.
        request, work: what the core and the engine are told.
        expects_followers: how many requests wait for its end.
        replica: the only one it can run on; None for any.
    """

    position: int
    request: Request
    work: Work
    expects_followers: int
    replica: int | None = None


class Arrivals:
    """Requests of a stream by time of arrival, read as the simulation comes to them.

    A request's `max_tokens` is its true output length: nothing but refusals of what can never fit, and how
    many gaps may be late, depends on it.

    Args:
        batches: assigned to classes and tenants.
        classes, tenants: what `class_index` and `tenant_index` point to.
        block_tokens: tokens per page, for digests of shared prefixes.
        intake_ns: how long after its arrival the scheduler gets to know of a request.
        exact_outputs: the scheduler knows that there will be no fewer tokens, as with `ignore_eos`.
        look: called whenever a request arrives, by who wants to look at the fleet then.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        classes: list[ServiceClass],
        tenants: list[str],
        block_tokens: int,
        intake_ns: int = 0,
        exact_outputs: bool = False,
        look: Callable[[], None] | None = None,
    ) -> None:
        self._stream = self._requests(batches)
        self._classes = classes
        self._tenants = tenants
        self._block_tokens = block_tokens
        self._intake_ns = intake_ns
        self._exact_outputs = exact_outputs
        self._look = look
        self._next = next(self._stream, None)
        self._due: list[tuple[int, int, Arrival]] = []  # followers whose parent has ended
        self._held: dict[int, list[tuple[int, int, Arrival]]] = {}
        self._ended: dict[int, tuple[int, int]] = {}  # position -> (time, followers still to come)

    def next_ns(self) -> int | None:
        """When the next request is taken in; None when no more can until something ends."""
        arrives = self._arrives_ns()
        return None if arrives is None else arrives + self._intake_ns

    def pop(self) -> Arrival:
        """The next request; its `arrival_ns` is the time at which it comes."""
        if self._look is not None:
            self._look()
        due = self._arrives_ns()
        if self._due and self._due[0][0] == due:
            when, _, arrival = heapq.heappop(self._due)
            return arrival._replace(request=replace(arrival.request, arrival_ns=when))
        assert self._next is not None
        arrival = self._next[3]
        self._next = next(self._stream, None)
        return arrival

    def ended(self, position: int, now: int, followers: int) -> None:
        """A request is over; those that wait for it can come."""
        held = self._held.pop(position, [])
        for earliest, delay, arrival in held:
            heapq.heappush(self._due, (max(earliest, now + delay), arrival.position, arrival))
        if followers > len(held):
            self._ended[position] = now, followers - len(held)

    def _arrives_ns(self) -> int | None:
        self._hold_followers()
        times = [self._due[0][0]] if self._due else []
        if self._next is not None:
            times.append(self._next[0])
        return min(times, default=None)

    def _hold_followers(self) -> None:
        """Put aside requests at the head of the stream that wait for another one."""
        while self._next is not None and self._next[1] != NONE:
            earliest, parent, delay, arrival = self._next
            self._next = next(self._stream, None)
            when = self._ended.pop(parent, None)
            if when is None:
                self._held.setdefault(parent, []).append((earliest, delay, arrival))
                continue
            if when[1] > 1:
                self._ended[parent] = when[0], when[1] - 1
            heapq.heappush(self._due, (max(earliest, when[0] + delay), arrival.position, arrival))

    def _requests(self, batches: Iterable[Batch]) -> Iterator[tuple[int, int, int, Arrival]]:
        for batch in batches:
            columns = (
                batch.arrival_ns, batch.prompt_tokens, batch.output_tokens, batch.class_index,
                batch.tenant_index, batch.ttft_ns, batch.follow.parent, batch.follow.delay_ns,
                batch.follow.followers,
            )  # fmt: skip
            for i, row in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
                when, prompt, output, cls, tenant, ttft, parent, delay, followers = row
                position = batch.first + i
                request = Request(
                    id=f"{position}",
                    prompt_tokens=prompt,
                    max_tokens=output,
                    tenant=self._tenants[tenant],
                    cls=self._classes[cls],
                    arrival_ns=when,
                    min_tokens=output if self._exact_outputs else 1,
                    block_hashes=self._digests(batch, i, prompt),
                    ttft_ns=None if ttft >= NEVER_NS else ttft,
                )
                yield when, parent, delay, Arrival(position, request, Work(prompt, output), followers)

    def _digests(self, batch: Batch, i: int, prompt: int) -> tuple[bytes, ...]:
        """One digest per full page of the prompt: the id of its block, and which page of it.

        Scattered, as the first bits of a digest are where the prefix index looks for it.
        """
        ids = batch.blocks.row(i)
        pages = prompt // self._block_tokens
        if not ids.size or not pages:
            return ()
        per_block = max(batch.blocks.tokens // self._block_tokens, 1)
        words = np.zeros((pages, DIGEST_BYTES // 8), np.uint64)
        page = np.arange(pages)
        words[:, 1] = ids[np.minimum(page // per_block, ids.size - 1)]
        words[:, 2] = page  # an id stands for all before it as well, and so does the page's number
        words[:, 0] = scattered(scattered(words[:, 1]) + words[:, 2])
        data = words.tobytes()
        return tuple(data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES))
