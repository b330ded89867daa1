"""Tiny models with random weights, and an engine driven by hand-made decisions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_models import build, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from kaiseki.core.decision import I32, Decision, StepResult
from kaiseki.core.reasons import Finish
from kaiseki.engines.embedded import EmbeddedEngine, GenerationWork, SamplingParams

BLOCK_TOKENS = 4
ROW_BLOCKS = 24


class ScatteredTables:
    """Gives each row blocks from all over the pool, in no order."""

    def __init__(self, rows: int, seed: int = 1) -> None:
        shuffled = np.random.default_rng(seed).permutation(rows * ROW_BLOCKS)
        self.blocks = shuffled.reshape(rows, ROW_BLOCKS).astype(np.int32)

    def tables(self, rows: I32, ends: I32) -> I32:
        return self.blocks[rows, : -(-int(ends.max()) // BLOCK_TOKENS)]


Chunk = tuple[int, int, int, bool]
"""row, start, tokens, samples"""


@dataclass
class Hand:
    """Plays the scheduler by hand."""

    engine: EmbeddedEngine
    tables: ScatteredTables
    reference: Any
    slot: int = 0
    epochs: dict[int, int] = field(default_factory=dict)

    def open(self, row: int, prompt: Sequence[int], **sampling: Any) -> None:
        sampling = {"max_tokens": 8, "temperature": 0.0, **sampling}
        self.engine.open(row, GenerationWork(tuple(prompt), SamplingParams(**sampling)))
        self.epochs[row] = self.epochs.get(row, -1) + 1

    def execute(self, chunks: Sequence[Chunk], copies: Sequence[tuple[int, int]] = ()) -> None:
        rows, starts, tokens, samples = (list(column) for column in zip(*chunks, strict=True))
        self.engine.execute(
            Decision(
                slot=self.slot,
                rows=np.array(rows, np.int32),
                tokens=np.array(tokens, np.int32),
                starts=np.array(starts, np.int32),
                samples=np.array(samples, bool),
                epochs=np.array([self.epochs[row] for row in rows], np.int32),
                copies=np.array(copies, np.int32).reshape(-1, 2),
            )
        )
        self.slot += 1

    def step(self, chunks: Sequence[Chunk], copies: Sequence[tuple[int, int]] = ()) -> StepResult:
        self.execute(chunks, copies)
        return self.engine.collect()

    def generate(self, prompt: Sequence[int], row: int = 0, **sampling: Any) -> Output:
        """One request alone: the prompt in one chunk, then token by token."""
        self.open(row, prompt, **sampling)
        out = Output()
        out.add(self.step([(row, 0, len(prompt), True)]), 0)
        while not out.finish and not out.failed:
            out.add(self.step([(row, len(prompt) + len(out.ids) - 1, 1, True)]), 0)
        self.engine.close(row)
        return out

    def expected(self, prompt: Sequence[int], max_tokens: int, **settings: Any) -> list[int]:
        """Greedy output of transformers' own generate."""
        ids = torch.tensor([list(prompt)])
        out = self.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **settings
        )
        return out[0, len(prompt) :].tolist()

    def next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([list(ids)])).logits[0, -1]


@dataclass
class Output:
    """What came back for one row."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish = Finish.NONE
    failed: bool = False
    payloads: list[Any] = field(default_factory=list)

    def add(self, result: StepResult, at: int) -> None:
        """Take what the row at index `at` of a result brought."""
        first = int(result.new_tokens[:at].sum())
        self.ids += result.token_ids[first : first + int(result.new_tokens[at])].tolist()
        self.finish = Finish(int(result.finish[at]))
        self.failed = bool(result.failed[at])
        for output in result.payloads[at] or ():
            self.text += output.text
            self.payloads.append(output)


@pytest.fixture
def hand() -> Iterator[Callable[..., Hand]]:
    """A function that makes a hand-driven engine for a family or a model."""
    made: list[EmbeddedEngine] = []

    def make(model: Any = "llama", *, rows: int = 6, depth: int = 0, **options: Any) -> Hand:
        model = build(model) if isinstance(model, str) else model
        reference = copy.deepcopy(model)
        tables = ScatteredTables(rows)
        engine = EmbeddedEngine(
            model,
            byte_tokenizer(),
            tables=tables,
            blocks=rows * ROW_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            threads=1,
            depth=depth,
            **options,
        )
        made.append(engine)
        return Hand(engine, tables, reference)

    yield make
    for engine in made:
        engine.shutdown()


@pytest.fixture
def model() -> Callable[..., Any]:
    """A function that builds a tiny random model of a family."""
    return build


@pytest.fixture
def output() -> type[Output]:
    """The class that gathers what came back for one row."""
    return Output


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """The tiny models' tokenizer."""
    return byte_tokenizer()
