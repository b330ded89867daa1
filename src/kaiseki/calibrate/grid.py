"""The chunk sets that are measured: decodes, prefill chunks at different depths, and both together."""

from __future__ import annotations

from collections.abc import Iterator

from kaiseki.server.measure import Group, Round

DECODE_STEPS = 8
DECODE_BATCHES = {1: (32, 256, 1024), 2: (64, 512), 4: (32, 256, 1024), 8: (64, 512), 16: (32, 256)}
"""Requests that decode together, and the contexts at which they do."""
CHUNKS = (16, 32, 64, 96, 128, 256, 512)
LONG_PROMPT = 768
"""Computed in chunks of each size, so that these begin at all depths."""
BESIDE = {2: (32, 128), 4: (16, 64), 8: (24, 96, 256), 16: (48,)}
"""Decodes, and the tokens of the chunks of a long prompt that run beside them."""
SHORT_PROMPT = 48


def grid() -> Iterator[Round]:
    """All rounds; neighbours differ in kind, so that a slow moment of the machine spoils none alone."""
    decodes = [
        Round(512, (Group(batch, context, DECODE_STEPS),))
        for batch, contexts in DECODE_BATCHES.items()
        for context in contexts
    ]
    chunks = [Round(chunk, (Group(1, LONG_PROMPT, 1),)) for chunk in CHUNKS]
    beside = [_beside(batch, chunk) for batch, sizes in BESIDE.items() for chunk in sizes]
    longest = max(len(decodes), len(chunks), len(beside))
    for i in range(longest):
        yield from (kind[i] for kind in (decodes, chunks, beside) if i < len(kind))


def _beside(batch: int, chunk: int) -> Round:
    """Requests that decode while a long prompt is computed, in what they leave of the budget."""
    budget = batch + chunk
    steps = -(-LONG_PROMPT // chunk) + -(-batch * SHORT_PROMPT // budget)
    return Round(budget, (Group(batch, SHORT_PROMPT, steps), Group(1, LONG_PROMPT, 1)))
