"""The embedded engine, driven by hand: as many steps as wanted, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from kaiseki.core.decision import I32, Decision
from kaiseki.engines.embedded import EmbeddedEngine, GenerationWork, SamplingParams

BLOCK_TOKENS = 16
PREFILL_CHUNK = 1024
"""A prompt that only prepares a measurement is computed in chunks of so many tokens."""


class _Contiguous:
    """Gives every row the same number of blocks, one row after the other."""

    def __init__(self, row_blocks: int) -> None:
        self._row_blocks = row_blocks

    def tables(self, rows: I32, ends: I32) -> I32:
        """See `BlockTables`."""
        first = rows.astype(np.int32)[:, None] * np.int32(self._row_blocks)
        found: I32 = first + np.arange(self._row_blocks, dtype=np.int32)[None, :]
        return found


class Ours:
    """What a peer does, on our engine; see `kaiseki.bench.peer.Peer`.

    Args:
        folder: the model.
        threads: threads to compute on.
        rows: most sequences at once.
        tokens: longest sequence.
    """

    def __init__(self, folder: Path, threads: int, rows: int, tokens: int) -> None:
        row_blocks = -(-tokens // BLOCK_TOKENS)
        self._engine = EmbeddedEngine.load(
            folder,
            tables=_Contiguous(row_blocks),
            blocks=rows * row_blocks,
            block_tokens=BLOCK_TOKENS,
            threads=threads,
            depth=1,
        )
        self._engine.warm_up()
        self._tokens = tokens
        self._lengths = np.empty(0, np.int32)
        self._slot = 0

    def open(self, prompts: list[list[int]]) -> None:
        """Begin sequences and compute their prompts and first tokens."""
        for row, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=self._tokens - len(prompt), temperature=0.0, ignore_eos=True)
            self._engine.open(row, GenerationWork(prompt, sampling))
            for start in range(0, len(prompt), PREFILL_CHUNK):
                tokens = min(PREFILL_CHUNK, len(prompt) - start)
                self._execute([row], [tokens], [start], start + tokens == len(prompt))
                self._collect()
        self._lengths = np.array([len(prompt) for prompt in prompts], np.int32)

    def step(self, steps: int) -> tuple[int, float]:
        """Decode all sequences so many times, one step ahead as a server does: (tokens, seconds)."""
        rows = list(range(self._lengths.size))
        begin = time.perf_counter()
        for i in range(steps):
            self._execute(rows, [1] * len(rows), self._lengths.tolist(), True)
            self._lengths += 1
            if i:
                self._collect()
        self._collect()
        return steps * len(rows), time.perf_counter() - begin

    def prefill(self, prompt: list[int]) -> tuple[int, float]:
        """Compute one prompt in one step, up to its first token: (tokens, seconds)."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        self._engine.open(0, GenerationWork(prompt, sampling))
        self._execute([0], [len(prompt)], [0], True)
        self._collect()
        seconds = time.perf_counter() - begin
        self._engine.close(0)
        return len(prompt), seconds

    def close(self) -> None:
        """End the sequences."""
        for row in range(self._lengths.size):
            self._engine.close(row)
        self._lengths = np.empty(0, np.int32)

    def shutdown(self) -> None:
        """End the engine."""
        self._engine.shutdown()

    def _execute(self, rows: list[int], tokens: list[int], starts: list[int], samples: bool) -> None:
        self._engine.execute(
            Decision(
                slot=self._slot,
                rows=np.array(rows, np.int32),
                tokens=np.array(tokens, np.int32),
                starts=np.array(starts, np.int32),
                samples=np.full(len(rows), samples),
                epochs=np.zeros(len(rows), np.int32),
            )
        )
        self._slot += 1

    def _collect(self) -> None:
        result = self._engine.collect()
        if result.failed.any():
            raise RuntimeError(f"the engine failed: {result.message}")
