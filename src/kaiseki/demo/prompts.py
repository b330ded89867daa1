"""Requests with real prompts: short questions, and source code to be explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from kaiseki.demo.documents import documents
from kaiseki.demo.questions import QUESTIONS

INTERACTIVE, BATCH = "interactive", "batch"
CLASSES = (INTERACTIVE, BATCH)

DOCUMENT_TOKENS = (600, 800)
"""Documents are cut to a length in this range: so alike that one deadline suits them all."""
OUTPUT_TOKENS = {INTERACTIVE: (24, 64), BATCH: (8, 16)}
"""Answers have an exact length, uniform in this range, so that the load is the same whoever schedules it."""

Messages = tuple[dict[str, str], ...]
Encode = Callable[[str], list[tuple[int, int]]]
"""The character range of each token of a text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks.

    Attributes:
        cls: service class.
        messages: the conversation.
        prompt_tokens: length of the messages' texts, tokens; the chat template adds about ten.
        output_tokens: exact length of the answer.
    """

    cls: str
    messages: Messages
    prompt_tokens: int
    output_tokens: int


def encoder(folder: Path) -> Encode:
    """The tokenizer of a model folder."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str) -> list[tuple[int, int]]:
        offsets: list[tuple[int, int]] = tokenizer.encode(text, add_special_tokens=False).offsets
        return offsets

    return encode


class PromptMaker:
    """Makes prompts of which no two begin alike, so that prefix caching has no part in the comparison.

    Args:
        encode: the model's tokenizer.
        seed: the same seed gives the same prompts in the same order.
    """

    def __init__(self, encode: Encode, seed: int) -> None:
        self._encode = encode
        self._rng = np.random.default_rng(seed)
        self._texts = {
            INTERACTIVE: _endless(QUESTIONS, self._rng),
            BATCH: _endless(documents(), self._rng),
        }

    def make(self, cls: str) -> Prompt:
        """The next prompt of a class."""
        low, high = OUTPUT_TOKENS[cls]
        output = int(self._rng.integers(low, high, endpoint=True))
        text = next(self._texts[cls])
        if cls == BATCH:
            text = f"Explain what this code does:\n\n{self._cut(text)}"
        # The number comes first and fills most of a KV block, so already that block is nobody else's.
        number = int(self._rng.integers(10**11, 10**12))
        system = f"{number} is the number of this conversation. Answer briefly."
        messages = ({"role": "system", "content": system}, {"role": "user", "content": text})
        tokens = sum(len(self._encode(message["content"])) for message in messages)
        return Prompt(cls, messages, tokens, output)

    def _cut(self, text: str) -> str:
        size = int(self._rng.integers(*DOCUMENT_TOKENS, endpoint=True))
        ranges = self._encode(text)[:size]
        return text[: ranges[-1][1]]


def _endless(texts: Sequence[str], rng: np.random.Generator) -> Iterator[str]:
    """All texts in random order, again and again in a new one."""
    while True:
        for index in rng.permutation(len(texts)):
            yield texts[index]
