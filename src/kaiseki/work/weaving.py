"""Many sessions woven into one stream in order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kaiseki.work.batches import BATCH_ROWS, BLOCK_TOKENS, I64, NONE, Batch, Blocks, Follow


@dataclass(frozen=True, slots=True)
class Script:
    """The requests of a session, one after the other, over a context that grows with each.

    Attributes:
        new_tokens: what each adds to the context before it is answered, >= 1.
        output_tokens: length of each answer, >= 1.
        delay_ns: from the answer before to each request; the first is 0.
        system_ids: int64[...], blocks that the context begins with, shared with other sessions.
    """

    new_tokens: list[int]
    output_tokens: list[int]
    delay_ns: list[int]
    system_ids: I64


@dataclass(slots=True)
class _Open:
    """A session under way."""

    script: Script
    session: int
    base: int
    context_tokens: int
    parent: int = NONE
    turn: int = 0


class _Rows:
    """The columns of a batch as they fill up."""

    def __init__(self) -> None:
        self.arrival_ns: list[int] = []
        self.prompt_tokens: list[int] = []
        self.output_tokens: list[int] = []
        self.session: list[int] = []
        self.parent: list[int] = []
        self.delay_ns: list[int] = []
        self.followers: list[int] = []
        self.ids: list[I64] = []

    def batch(self, first: int, block_tokens: int) -> Batch:
        follow = Follow(
            np.array(self.session, np.int64),
            np.array(self.parent, np.int64),
            np.array(self.delay_ns, np.int64),
            np.array(self.followers, np.int32),
        )
        blocks = Blocks.of(self.ids, block_tokens)
        return Batch.of(first, self.arrival_ns, self.prompt_tokens, self.output_tokens, follow, blocks)


def weave(
    starts: Iterable[tuple[int, Script]], first_id: int, block_tokens: int = BLOCK_TOKENS
) -> Iterator[Batch]:
    """The requests of sessions in order of their earliest arrival.

    Args:
        starts: start in nanoseconds and script of each session, in order of start.
        first_id: least block id that no system prompt has.
        block_tokens: tokens per block.

    Returns:
        Batches whose block ids cover prompts and outputs, so that the next request of a session finds
        both.
    """
    first, next_id = 0, first_id
    rows = _Rows()
    waiting: list[tuple[int, int, _Open]] = []
    upcoming = iter(enumerate(starts))
    coming = next(upcoming, None)
    while waiting or coming is not None:
        if coming is not None and (not waiting or coming[1][0] <= waiting[0][0]):
            number, (start_ns, script) = coming
            system_tokens = len(script.system_ids) * block_tokens
            one = _Open(script, number, next_id - len(script.system_ids), system_tokens)
            total = system_tokens + sum(script.new_tokens) + sum(script.output_tokens)
            next_id = one.base + -(-total // block_tokens)
            heapq.heappush(waiting, (start_ns, number, one))
            coming = next(upcoming, None)
            continue
        arrival_ns, number, one = heapq.heappop(waiting)
        _ask(rows, one, arrival_ns, block_tokens)
        one.parent = first + len(rows.ids) - 1
        if one.turn < len(one.script.new_tokens):
            heapq.heappush(waiting, (arrival_ns + one.script.delay_ns[one.turn], number, one))
        if len(rows.ids) == BATCH_ROWS:
            yield rows.batch(first, block_tokens)
            first, rows = first + BATCH_ROWS, _Rows()
    if rows.ids:
        yield rows.batch(first, block_tokens)


def _ask(rows: _Rows, one: _Open, arrival_ns: int, block_tokens: int) -> None:
    """Append the next request of a session."""
    script, turn = one.script, one.turn
    prompt_tokens = one.context_tokens + script.new_tokens[turn]
    one.context_tokens = prompt_tokens + script.output_tokens[turn]
    one.turn += 1
    system = script.system_ids
    blocks = -(-one.context_tokens // block_tokens)
    own = np.arange(one.base + len(system), one.base + blocks, dtype=np.int64)
    rows.arrival_ns.append(arrival_ns)
    rows.prompt_tokens.append(prompt_tokens)
    rows.output_tokens.append(script.output_tokens[turn])
    rows.session.append(one.session)
    rows.parent.append(one.parent)
    rows.delay_ns.append(script.delay_ns[turn])
    rows.followers.append(int(one.turn < len(script.new_tokens)))
    rows.ids.append(np.concatenate((system, own)))
