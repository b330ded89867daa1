"""Generated requests that don't wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kaiseki.work.arrivals import Arrivals
from kaiseki.work.batches import Batch
from kaiseki.work.lengths import Lengths
from kaiseki.work.prefixes import Grower, PrefixTree


@dataclass(frozen=True, slots=True)
class OneShot:
    """Each request on its own, with prompt, output and arrival drawn independently.

    Attributes:
        arrivals: when they come.
        prompt: lengths of prompts.
        output: lengths of outputs.
        prefixes: what their prompts share; None for nothing that is known.
    """

    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    prefixes: PrefixTree | None = None

    def stream(self, seed: int) -> Iterator[Batch]:
        """Requests without end, the same ones for the same seed."""
        for_arrivals, for_prompts, for_outputs, for_prefixes = np.random.default_rng(seed).spawn(4)
        grower = None if self.prefixes is None else Grower(self.prefixes, for_prefixes)
        first = 0
        for arrival_ns in self.arrivals.times_ns(for_arrivals):
            n = len(arrival_ns)
            prompt_tokens = self.prompt.draw(for_prompts, n)
            blocks = None if grower is None else grower.grow(prompt_tokens)
            output_tokens = self.output.draw(for_outputs, n)
            yield Batch.of(first, arrival_ns, prompt_tokens, output_tokens, blocks=blocks)
            first += n
