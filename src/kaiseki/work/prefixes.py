"""Which prefixes requests share: system prompts, and branches of what others sent before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.work.batches import BATCH_ROWS, BLOCK_TOKENS, I32, I64, Blocks
from kaiseki.work.lengths import Quantiles

POPULARITY = 1.0
"""Exponent of Zipf's law: the system prompt of rank r is used in proportion to 1/r."""


@dataclass(frozen=True, slots=True)
class SystemPrompts:
    """Prompts that many requests begin with; the ids of their blocks are the lowest of all.

    Attributes:
        count: how many there are; their popularity follows Zipf's law.
        blocks: full blocks in each.

    Raises:
        ValueError: count is below 1 or blocks below 0.
    """

    count: int = 1
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or self.blocks < 0:
            raise ValueError(f"there must be at least one system prompt, of 0 or more blocks, got {self}")

    @property
    def ids(self) -> int:
        """Block ids that are taken by system prompts; others begin here."""
        return self.count * self.blocks

    def choose(self, rng: np.random.Generator, n: int) -> I64:
        """int64[n]: which one each of n requests begins with."""
        worth = np.arange(1, self.count + 1) ** -POPULARITY
        return np.searchsorted(np.cumsum(worth) / worth.sum(), rng.random(n), "right").astype(np.int64)

    def of(self, which: int) -> I64:
        """int64[blocks]: the block ids of one."""
        return np.arange(which * self.blocks, (which + 1) * self.blocks, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A tree that grows with every request: some branch off an earlier one, the rest off a system prompt.

    Attributes:
        system: the roots.
        branch_share: how many share more than a system prompt with an earlier request, of those that are
            longer than that, 0 to 1.
        lag: how many requests ago that one was, at least.
        depth: the shared part of a request that branches off, over its own blocks, 0 to 1.
        block_tokens: tokens per block.

    Raises:
        ValueError: a value is out of its range.
    """

    system: SystemPrompts
    branch_share: float
    lag: Quantiles
    depth: Quantiles
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.branch_share <= 1:
            raise ValueError(f"branch_share must be between 0 and 1, got {self.branch_share}")
        if self.lag.values[0] < 1 or self.depth.values[0] < 0 or self.depth.values[-1] > 1:
            raise ValueError("lag must be at least 1 request, depth between 0 and 1")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {self.block_tokens}")


TRIES = 128
"""Requests looked at, from the lag drawn on, for one long enough to branch off at the depth drawn."""


class Grower:
    """A tree as it grows; it remembers as many requests as the greatest lag and `TRIES`."""

    def __init__(self, tree: PrefixTree, rng: np.random.Generator) -> None:
        self._tree = tree
        self._rng = rng
        self._next_id = tree.system.ids
        self._recent: list[I64] = []
        self._keep = int(tree.lag.values[-1]) + TRIES

    def grow(self, prompt_tokens: I32) -> Blocks:
        """The blocks of the next requests, by their prompt lengths int32[n].

        At least the last token of a prompt is its own, so that its last block is shared by nobody before.
        """
        tree, rng, n = self._tree, self._rng, len(prompt_tokens)
        roots = tree.system.choose(rng, n).tolist()
        chosen = rng.random(n) < tree.branch_share
        lags = np.rint(tree.lag.sample(rng, n)).astype(np.int64).tolist()
        depths = tree.depth.sample(rng, n)
        own = -(-prompt_tokens.astype(np.int64) // tree.block_tokens)
        most = (prompt_tokens - 1) // tree.block_tokens
        branches = (chosen & (most > tree.system.blocks)).tolist()
        deep = np.maximum(np.rint(depths * own), tree.system.blocks + 1)
        shared = np.minimum(deep, most).astype(np.int64).tolist()
        rows = []
        for i, (blocks, limit) in enumerate(zip(own.tolist(), most.tolist(), strict=True)):
            branch = branches[i] and self._recent
            old = self._earlier(lags[i], shared[i]) if branch else tree.system.of(roots[i])[:limit]
            ids = np.empty(blocks, np.int64)
            ids[: len(old)] = old
            fresh = blocks - len(old)
            ids[len(old) :] = np.arange(self._next_id, self._next_id + fresh)
            self._next_id += fresh
            self._recent.append(ids)
            rows.append(ids)
        if len(self._recent) > self._keep + BATCH_ROWS:
            del self._recent[: -self._keep]
        return Blocks.of(rows, tree.block_tokens)

    def _earlier(self, lag: int, shared: int) -> I64:
        """The first `shared` blocks of an earlier request, or what the longest of those tried has of them."""
        start = max(len(self._recent) - lag, 0)
        best = self._recent[start]
        for one in self._recent[start : max(start - TRIES, 0) : -1]:
            if len(one) > shared:
                return one[:shared]
            if len(one) > len(best):
                best = one
        return best[: min(shared, len(best) - 1)]
