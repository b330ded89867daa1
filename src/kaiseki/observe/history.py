"""Recent past of one scheduler, in rings: touched requests, cutoffs, slots. What `explain` reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kaiseki.core.endings import Ending
from kaiseki.core.jit import kernel
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.requests import Request
from kaiseki.core.trace import CUTOFF, RECORD

SLOT = np.dtype([("slot", np.int64), ("decided_ns", np.int64)])


@kernel
def write_around(ring: npt.NDArray[np.void], at: int, records: npt.NDArray[np.void]) -> None:
    """Write records from place `at` on, and on from the beginning where the ring ends."""
    for i in range(records.size):
        ring[at] = records[i]
        at = at + 1 if at + 1 < ring.size else 0


class Ring:
    """The last `capacity` records of one structured dtype, oldest first when read."""

    def __init__(self, dtype: np.dtype[np.void], capacity: int) -> None:
        self._data: npt.NDArray[np.void] = np.zeros(capacity, dtype)
        self._written = 0

    def extend(self, records: npt.NDArray[np.void]) -> None:
        """Append records; the oldest make room."""
        if records.size == 0:
            return
        size = self._data.size
        records = records[-size:]
        write_around(self._data, self._written % size, records)
        self._written += records.size

    def append(self, *fields: float) -> None:
        """Append one record."""
        self._data[self._written % self._data.size] = fields
        self._written += 1

    def newest(self, most: int) -> npt.NDArray[np.void]:
        """A copy of the last records, at most so many, oldest first."""
        size = self._data.size
        count = min(most, self._written, size)
        end = self._written % size
        if count <= end:
            return self._data[end - count : end].copy()
        return np.concatenate([self._data[size - (count - end) :], self._data[:end]])

    def read(self) -> npt.NDArray[np.void]:
        """A copy of what is kept, oldest first."""
        if self._written <= self._data.size:
            return self._data[: self._written].copy()
        turn = self._written % self._data.size
        return np.concatenate([self._data[turn:], self._data[:turn]])


@dataclass(slots=True)
class Story:
    """What is known of one request apart from its events.

    Attributes:
        request: as submitted (lengths, class, tenant; no text), without digests once it is in a history.
        seq: arrival sequence; -1 when it was refused.
        tenant: tenant index in the core.
        key: policy key under which it waited first.
        ending: how it ended, or None.
        refusal: reason and numbers when it was refused.
    """

    request: Request
    seq: int
    tenant: int = -1
    key: float = 0.0
    ending: Ending | None = None
    refusal: Reason | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    refused_ns: int = 0


class Limits(NamedTuple):
    """Settings that counterfactuals are told against."""

    total_blocks: int
    watermark_ratio: float


class History:
    """Bounded memory of what happened.

    Args:
        records: how many records of touched requests to keep.
        requests: how many requests to keep; ended ones go first in, first out.
        limits: of the scheduler whose history it is, if known.
    """

    def __init__(self, records: int = 1 << 17, requests: int = 1 << 14, limits: Limits | None = None) -> None:
        self.limits = limits
        self.records = Ring(RECORD, records)
        self.cutoffs = Ring(CUTOFF, records // 4)
        self.slots = Ring(SLOT, records // 2)
        self._stories: OrderedDict[str, Story] = OrderedDict()
        self._by_seq: dict[int, str] = {}
        self._capacity = requests

    def opened(self, story: Story) -> None:
        """Remember a new request, or a refused one, but not its prompt's digests: they may be many."""
        story.request = story.request.without_digests()
        before = self._stories.pop(story.request.id, None)  # an id is free again once its request has ended
        if before is not None:
            self._by_seq.pop(before.seq, None)
        self._stories[story.request.id] = story
        if story.seq >= 0:
            self._by_seq[story.seq] = story.request.id
        while len(self._stories) > self._capacity:
            _, old = self._stories.popitem(last=False)
            self._by_seq.pop(old.seq, None)

    def ended(self, ending: Ending) -> None:
        """Remember how a request ended."""
        story = self._stories.get(ending.request_id)
        if story is not None:
            story.ending = ending

    def slot(
        self, slot: int, decided_ns: int, records: npt.NDArray[np.void], cutoffs: npt.NDArray[np.void]
    ) -> None:
        """Take in what one decision, or what happened since the last one, left behind."""
        self.slots.append(slot, decided_ns)
        self.records.extend(records)
        self.cutoffs.extend(cutoffs)

    def note(self, records: npt.NDArray[np.void]) -> None:
        """Take in records that belong to no decision: what a step's result did."""
        self.records.extend(records)

    def story(self, request_id: str) -> Story | None:
        """What is known of a request."""
        return self._stories.get(request_id)

    def stories(self) -> Iterator[Story]:
        """All that is kept, oldest first."""
        yield from self._stories.values()

    def name_of(self, seq: int) -> str | None:
        """Request id of an arrival sequence."""
        return self._by_seq.get(seq)

    def story_of(self, seq: int) -> Story | None:
        """What is known of the request with an arrival sequence."""
        return self._stories.get(self._by_seq.get(seq, ""))

    def recent(self, limit: int, tenant: str | None) -> list[dict[str, Any]]:
        """Newest requests first, in one line each; only those of `tenant` unless it is None."""
        found: list[dict[str, Any]] = []
        for story in reversed(self._stories.values()):
            if len(found) == limit:
                break
            if tenant is None or story.request.tenant == tenant:
                found.append(summary_of(story))
        return found


def summary_of(story: Story) -> dict[str, Any]:
    """One line about a request: who, how long, how it ended."""
    r, e = story.request, story.ending
    outcome = Outcome.REFUSED if story.refusal is not None else (e.outcome if e else Outcome.OPEN)
    first = None
    if e is not None and e.first_token_ns >= 0:
        first = round((e.first_token_ns - e.arrival_ns) / 1e6, 3)
    return {
        "request": r.id,
        "tenant": r.tenant,
        "class": r.cls.name,
        "prompt_tokens": r.prompt_tokens,
        "output_tokens": e.outputs if e else None,
        "outcome": outcome.label,
        "attained": e.attained if e else (False if story.refusal is not None else None),
        "ttft_ms": first,
    }
