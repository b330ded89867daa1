"""The flattened input of one forward, and the block tables it is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kaiseki.core.decision import I32, I64


class BlockTables(Protocol):
    """Where each row's KV is. The memory pool provides it."""

    def tables(self, rows: I32, ends: I32) -> I32:
        """int32[n, max_blocks]: block ids that cover positions [0, end) of each row, in order.

        Columns past a row's last block hold anything; `rows` and `ends` are int32[n].
        """
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks laid end to end, as the model sees them.

    Attributes:
        ids: int32[T], token ids.
        positions: int64[T], position of each token in its sequence.
        slots: int64[T], where each token's K and V go: block * block_tokens + offset.
        bounds: int32[n + 1], chunk i is ids[bounds[i]:bounds[i + 1]].
        ends: int32[n], each sequence's length once its chunk is in the pool.
        tables: int32[n, max_blocks], the chunks' block ids.
        sampled: int64[s], indices into [0, T) whose logits are wanted.
    """

    ids: I32
    positions: I64
    slots: I64
    bounds: I32
    ends: I32
    tables: I32
    sampled: I64

    @property
    def lengths(self) -> I32:
        """int32[n], chunk sizes."""
        return np.diff(self.bounds)


def lay_out(chunks: list[I32], starts: I32, tables: I32, samples: list[bool], block_tokens: int) -> Batch:
    """Flatten chunks of token ids.

    Args:
        chunks: token ids of each chunk, none empty.
        starts: int32[n], position of each chunk's first token.
        tables: int32[n, max_blocks].
        samples: whether the logits of a chunk's last token are wanted.
        block_tokens: tokens per block.
    """
    lengths = np.array([c.size for c in chunks], np.int32)
    bounds = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    owner = np.repeat(np.arange(lengths.size), lengths)
    positions = np.arange(int(bounds[-1])) - bounds[owner] + starts[owner].astype(np.int64)
    blocks = tables[owner, positions // block_tokens].astype(np.int64)
    return Batch(
        ids=np.concatenate(chunks),
        positions=positions,
        slots=blocks * block_tokens + positions % block_tokens,
        bounds=bounds,
        ends=starts + lengths,
        tables=tables,
        sampled=(bounds[1:][np.array(samples, bool)] - 1).astype(np.int64),
    )
