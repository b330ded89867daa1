"""Generated sessions: chats with think time, and programs that call a model and tools in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kaiseki.work.arrivals import Arrivals
from kaiseki.work.batches import BLOCK_TOKENS, F64, I64, MAX_TOKENS, Batch
from kaiseki.work.lengths import Lengths
from kaiseki.work.prefixes import SystemPrompts
from kaiseki.work.weaving import Script, weave

ONE_SYSTEM_PROMPT = SystemPrompts()
CHUNK = 1024
"""Sessions drawn at a time."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Lognormal time between an answer and the next request.

    Attributes:
        median_s: half of the delays are shorter.
        sigma: standard deviation of the logarithm.
        most_s: longer ones are cut to this; a person who comes back later starts anew.

    Raises:
        ValueError: a value is not positive.
    """

    median_s: float
    sigma: float
    most_s: float

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in (self.median_s, self.sigma, self.most_s)):
            raise ValueError(f"median_s, sigma and most_s must be positive numbers, got {self}")

    def draw_ns(self, rng: np.random.Generator, n: int) -> I64:
        """int64[n], nanoseconds."""
        delays_s: F64 = np.minimum(rng.lognormal(math.log(self.median_s), self.sigma, n), self.most_s)
        return np.rint(delays_s * 1e9).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions whose every request carries all that was said before.

    A chat has few turns with long think times between; an agent program many calls with short tool
    times. The number of turns is geometric.

    Attributes:
        arrivals: when sessions start (not requests).
        mean_turns: requests per session, >= 1.
        first: what the first request adds to the system prompt, tokens.
        more: what each later one adds: a question, or what a tool returned.
        output: lengths of answers.
        delay: from an answer to the next request.
        system: what contexts begin with.
        max_context: a session ends before prompt and output together exceed this, tokens.
        block_tokens: tokens per block.

    Raises:
        ValueError: a value is out of its range.
    """

    arrivals: Arrivals
    mean_turns: float
    first: Lengths
    more: Lengths
    output: Lengths
    delay: Delay
    system: SystemPrompts = ONE_SYSTEM_PROMPT
    max_context: int = 131_072
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not 1 <= self.mean_turns < math.inf:
            raise ValueError(f"mean_turns must be at least 1, got {self.mean_turns}")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {self.block_tokens}")
        least = self.system.blocks * self.block_tokens + 2
        if not least <= self.max_context <= MAX_TOKENS:
            raise ValueError(f"max_context must be from {least} to {MAX_TOKENS}, got {self.max_context}")

    def stream(self, seed: int) -> Iterator[Batch]:
        """Requests without end, the same ones for the same seed."""
        for_arrivals, for_scripts = np.random.default_rng(seed).spawn(2)
        starts = (int(time) for times in self.arrivals.times_ns(for_arrivals) for time in times)
        scripts = self._scripts(for_scripts)
        return weave(zip(starts, scripts, strict=False), self.system.ids, self.block_tokens)

    def _scripts(self, rng: np.random.Generator) -> Iterator[Script]:
        while True:
            turns = rng.geometric(1 / self.mean_turns, CHUNK)
            roots = self.system.choose(rng, CHUNK).tolist()
            begins = np.concatenate(([0], np.cumsum(turns)))
            added = self.more.draw(rng, begins[-1])
            added[begins[:-1]] = self.first.draw(rng, CHUNK)
            output = self.output.draw(rng, begins[-1])
            delay_ns = self.delay.draw_ns(rng, begins[-1])
            delay_ns[begins[:-1]] = 0
            for i in range(CHUNK):
                rows = slice(begins[i], begins[i + 1])
                yield self._script(
                    added[rows].tolist(), output[rows].tolist(), delay_ns[rows].tolist(), roots[i]
                )

    def _script(self, added: list[int], output: list[int], delay_ns: list[int], root: int) -> Script:
        """As many turns as fit in the context; the first is shrunk to fit if need be."""
        room = self.max_context - self.system.blocks * self.block_tokens
        output[0] = min(output[0], room - 1)
        added[0] = min(added[0], room - output[0])
        total, turns = 0, 0
        for new, out in zip(added, output, strict=True):
            total += new + out
            if total > room:
                break
            turns += 1
        return Script(added[:turns], output[:turns], delay_ns[:turns], self.system.of(root))
