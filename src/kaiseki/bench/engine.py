"""Tokens per second of the embedded engine, and of a peer in the same run, round by round in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kaiseki.bench.limits import Peaks, Weights, count_weights, find_limit, measure_peaks
from kaiseki.bench.peer import Peer, start_peer
from kaiseki.models.progress import Progress, quiet

ROUNDS = 7
STEPS = 12
CONTEXT = 256
BATCHES = (1, 8, 32)
PREFILL_TOKENS = 1024
LEAST_RATIO = {("decode", 8): 1.0, ("decode", 32): 1.0, ("prefill", 1): 0.8}
"""What is aimed at, against the peer."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured.

    Attributes:
        rounds: measurements of each case, of which the median counts.
        steps: decode steps of a round.
        context: tokens of each sequence, in the middle of the measurement.
        batches: sequences that decode together.
        prefill_tokens: prompt length of the prefill case.
        vocabulary: token ids are below this.
    """

    vocabulary: int
    rounds: int = ROUNDS
    steps: int = STEPS
    context: int = CONTEXT
    batches: tuple[int, ...] = BATCHES
    prefill_tokens: int = PREFILL_TOKENS

    @property
    def prompt_tokens(self) -> int:
        """Prompt length with which decodes are at `context` in the middle."""
        return max(1, self.context - (self.rounds + 1) * self.steps // 2)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with room for a last one."""
        decoded = self.prompt_tokens + (self.rounds + 1) * self.steps
        return max(decoded, self.prefill_tokens) + 1


def run(
    folder: Path, peer: str | None, threads: int | None, rounds: int = ROUNDS, progress: Progress = quiet
) -> dict[str, Any]:
    """Everything that `kaiseki bench engine` finds.

    Args:
        folder: the model.
        peer: what to compare with, see `start_peer`.
        threads: of each engine; all CPUs that this process may use by default.
        rounds: how often each case is measured.
        progress: told what is being done.

    Raises:
        ValueError: the peer's specification is not understood.
        PeerFailed: it did not start, or broke.
    """
    from kaiseki.bench.ours import Ours
    from kaiseki.engines.embedded.threads import available_threads

    threads = threads or available_threads()
    vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    sizes = Sizes(vocabulary, rounds)
    rows, longest = max(sizes.batches), sizes.longest
    with ExitStack() as stack:
        engines: list[Peer] = []
        if peer is not None:
            progress(f"starting the peer {peer}, about a minute", 0, 0)
            other = start_peer(peer, folder, threads, rows, longest)
            stack.callback(other.shutdown)
            engines.append(other)
        progress("loading and compiling the embedded engine, about half a minute", 0, 0)
        ours = Ours(folder, threads, rows, longest)
        stack.callback(ours.shutdown)
        engines.insert(0, ours)
        cases = measure(engines, sizes, progress)
        peaks = measure_peaks(threads)
        _add_limits(cases, ours, sizes, count_weights(folder), peaks)
    return {"threads": threads, "dtype": "float32", "peer": peer, "peaks": asdict(peaks), "cases": cases}


def _add_limits(
    cases: Sequence[dict[str, Any]], ours: Peer, sizes: Sizes, weights: Weights, peaks: Peaks
) -> None:
    rng = np.random.default_rng(1)
    for case in cases:
        batch, steps = case["batch"], sizes.steps
        if case["kind"] == "decode":
            ours.open(_prompts(rng, sizes, batch, sizes.prompt_tokens))
            ours.step(1)
            limit = find_limit(partial(ours.step, steps), steps, batch * steps, weights, peaks)
            ours.close()
        else:
            prompt = _prompts(rng, sizes, 1, sizes.prefill_tokens)[0]
            limit = find_limit(partial(ours.prefill, prompt), 1, 1, weights, peaks)
        case["limit"] = limit.document()


def measure(engines: Sequence[Peer], sizes: Sizes, progress: Progress = quiet) -> list[dict[str, Any]]:
    """The cases of one or two engines, ours first; the engines take turns in every round."""
    rng = np.random.default_rng(0)
    cases = []
    for number, batch in enumerate(sizes.batches):
        progress(f"decode, batch {batch}", number, len(sizes.batches) + 1)
        prompts = _prompts(rng, sizes, batch, sizes.prompt_tokens)
        for engine in engines:
            engine.open(prompts)
        rates = _in_turn(engines, sizes.rounds, lambda engine: engine.step(sizes.steps))
        for engine in engines:
            engine.close()
        cases.append(_case("decode", batch, rates))
    progress(f"prefill, {sizes.prefill_tokens} tokens", len(sizes.batches), len(sizes.batches) + 1)
    fresh = iter(_prompts(rng, sizes, (sizes.rounds + 1) * len(engines), sizes.prefill_tokens))
    rates = _in_turn(engines, sizes.rounds, lambda engine: engine.prefill(next(fresh)))
    return [*cases, _case("prefill", 1, rates)]


def _prompts(rng: np.random.Generator, sizes: Sizes, count: int, tokens: int) -> list[list[int]]:
    ids: list[list[int]] = rng.integers(1, sizes.vocabulary, (count, tokens)).tolist()
    return ids


def _in_turn(
    engines: Sequence[Peer], rounds: int, run: Callable[[Peer], tuple[int, float]]
) -> list[list[float]]:
    """Tokens per second of each engine in each round; a first round is not counted."""
    rates: list[list[float]] = [[] for _ in engines]
    for number in range(rounds + 1):
        for i, engine in enumerate(engines):
            tokens, seconds = run(engine)
            if number:
                rates[i].append(tokens / seconds)
    return rates


def _case(kind: str, batch: int, rates: Sequence[Sequence[float]]) -> dict[str, Any]:
    ours = float(np.median(rates[0]))
    peer = float(np.median(rates[1])) if len(rates) > 1 else None
    # Neighbours in time saw the same machine, so the ratio is the median of theirs.
    ratio = float(np.median(np.divide(rates[0], rates[1]))) if len(rates) > 1 else None
    least = LEAST_RATIO.get((kind, batch))
    return {
        "kind": kind,
        "batch": batch,
        "tokens_per_s": ours,
        "peer_tokens_per_s": peer,
        "ratio": ratio,
        "target_ratio": least,
        "ok": None if ratio is None or least is None else ratio >= least,
    }
