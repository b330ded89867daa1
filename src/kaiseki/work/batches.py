"""Requests as struct-of-arrays batches, streamed in order of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kaiseki.core.requests import NEVER_NS

I16 = npt.NDArray[np.int16]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

BATCH_ROWS = 16_384
"""Requests per batch of a stream; the last one has fewer."""
BLOCK_TOKENS = 512
"""Tokens that one prefix block id stands for, as in the Mooncake traces."""
MAX_TOKENS = 10_000_000
"""The longest prompt or output that is believed: no model takes a longer context."""
NONE = -1
"""In `parent` and `session`: there is none."""


@dataclass(frozen=True, slots=True)
class Follow:
    """How the n requests of a batch hang together: sessions, turns of a chat, calls of a program.

    A request with a parent arrives at the later of its `arrival_ns` and `delay_ns` after its parent's
    last token; its `arrival_ns` is the earliest possible, so that a stream is in order whatever the
    service times turn out to be.

    Attributes:
        session: int64[n], equal for requests of one session, `NONE` for a request on its own.
        parent: int64[n], position in the stream of the request that it waits for, or `NONE`.
        delay_ns: int64[n], from the parent's last token to its arrival: think time or tool time.
        followers: int32[n], how many later requests have this one as parent. Once that many were
            read, nobody asks for its end any more.
    """

    session: I64
    parent: I64
    delay_ns: I64
    followers: I32

    @staticmethod
    def nobody(n: int) -> Follow:
        """Requests that have nothing to do with each other."""
        none = np.full(n, NONE, np.int64)
        return Follow(none, none, np.zeros(n, np.int64), np.zeros(n, np.int32))

    def at(self, rows: slice) -> Follow:
        """Those of some rows."""
        return Follow(self.session[rows], self.parent[rows], self.delay_ns[rows], self.followers[rows])


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which prefixes the n requests of a batch share: ids of their blocks, in one array.

    Block k of a request is its tokens `[k * tokens, (k + 1) * tokens)`; equal ids mean equal tokens from
    position 0 to the end of the block. A request has no ids where nothing is known, otherwise one per
    block of its prompt, a last partial one included, and perhaps more, which belong to its output.

    Attributes:
        offsets: int64[n + 1], row i has the ids `ids[offsets[i]:offsets[i + 1]]`.
        ids: int64[offsets[n]].
        tokens: tokens per block.
    """

    offsets: I64
    ids: I64
    tokens: int = BLOCK_TOKENS

    @staticmethod
    def unknown(n: int, tokens: int = BLOCK_TOKENS) -> Blocks:
        """Requests of which no prefixes are known."""
        return Blocks(np.zeros(n + 1, np.int64), np.zeros(0, np.int64), tokens)

    @staticmethod
    def of(rows: Sequence[npt.ArrayLike], tokens: int = BLOCK_TOKENS) -> Blocks:
        """From the ids of each request."""
        parts = [np.asarray(row, np.int64) for row in rows]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return Blocks(offsets, np.concatenate(parts) if parts else offsets[:0], tokens)

    def row(self, i: int) -> I64:
        """int64[...]: the ids of request i."""
        return self.ids[self.offsets[i] : self.offsets[i + 1]]

    def at(self, rows: slice) -> Blocks:
        """Those of some consecutive rows."""
        start, stop, _ = rows.indices(len(self.offsets) - 1)
        offsets = self.offsets[start : stop + 1]
        return Blocks(offsets - offsets[0], self.ids[offsets[0] : offsets[-1]], self.tokens)

    def cut(self, prompt_tokens: I32) -> Blocks:
        """Without the ids past the given prompt lengths, int32[n]."""
        have = np.diff(self.offsets)
        keep = np.minimum(have, -(-prompt_tokens.astype(np.int64) // self.tokens))
        place = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], have)
        offsets = np.zeros_like(self.offsets)
        np.cumsum(keep, out=offsets[1:])
        return Blocks(offsets, self.ids[place < np.repeat(keep, have)], self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """n consecutive requests of a stream, in order of arrival.

    Attributes:
        first: position of the first of them in the stream, from 0.
        arrival_ns: int64[n], since the start of the stream; see `Follow` for requests with a parent.
        prompt_tokens: int32[n], 1 to `MAX_TOKENS`.
        output_tokens: int32[n], 1 to `MAX_TOKENS`.
        class_index: int16[n], into the class names of the classes file; 0 until assigned.
        tenant_index: int16[n], into the tenant names; 0 until assigned.
        ttft_ns: int64[n], the TTFT target of each request; `NEVER_NS` where none applies.
        follow: sessions and parents.
        blocks: prefix blocks.
    """

    first: int
    arrival_ns: I64
    prompt_tokens: I32
    output_tokens: I32
    class_index: I16
    tenant_index: I16
    ttft_ns: I64
    follow: Follow
    blocks: Blocks

    @staticmethod
    def of(
        first: int,
        arrival_ns: npt.ArrayLike,
        prompt_tokens: npt.ArrayLike,
        output_tokens: npt.ArrayLike,
        follow: Follow | None = None,
        blocks: Blocks | None = None,
    ) -> Batch:
        """A batch of requests that nobody has assigned to classes and tenants yet."""
        arrivals = np.asarray(arrival_ns, np.int64)
        n = len(arrivals)
        return Batch(
            first=first,
            arrival_ns=arrivals,
            prompt_tokens=np.asarray(prompt_tokens, np.int32),
            output_tokens=np.asarray(output_tokens, np.int32),
            class_index=np.zeros(n, np.int16),
            tenant_index=np.zeros(n, np.int16),
            ttft_ns=np.full(n, NEVER_NS, np.int64),
            follow=Follow.nobody(n) if follow is None else follow,
            blocks=Blocks.unknown(n) if blocks is None else blocks,
        )

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def head(self, n: int) -> Batch:
        """The first n requests, or all where there are fewer."""
        rows = slice(0, n)
        return replace(
            self,
            arrival_ns=self.arrival_ns[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            class_index=self.class_index[rows],
            tenant_index=self.tenant_index[rows],
            ttft_ns=self.ttft_ns[rows],
            follow=self.follow.at(rows),
            blocks=self.blocks.at(rows),
        )


def take(batches: Iterable[Batch], requests: int) -> Iterator[Batch]:
    """The first so many requests of a stream; of those left out `followers` may still count some."""
    if requests <= 0:
        return
    left = requests
    for batch in batches:
        yield batch if len(batch) <= left else batch.head(left)
        left -= len(batch)
        if left <= 0:
            return
