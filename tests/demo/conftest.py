"""A tokenizer without a model, and prompts and answers made by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kaiseki.demo.client import Answer
from kaiseki.demo.prompts import INTERACTIVE, Prompt


def words(text: str) -> list[tuple[int, int]]:
    """A token per word."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def make_prompt(cls: str = INTERACTIVE, prompt_tokens: int = 20, output_tokens: int = 4) -> Prompt:
    return Prompt(cls, ({"role": "user", "content": "hello"},), prompt_tokens, output_tokens)


def make_answer(times_ms: Sequence[float], arrival_ms: float = 0.0, **more: object) -> Answer:
    prompt = more.pop("prompt", None) or make_prompt(output_tokens=max(1, len(times_ms)))
    fields = {"finished": True, "status": 200, **more}
    return Answer(prompt, arrival_ms=arrival_ms, token_ms=np.array(times_ms, np.float64), **fields)


@pytest.fixture
def encode() -> Callable[[str], list[tuple[int, int]]]:
    return words


@pytest.fixture
def prompt() -> Callable[..., Prompt]:
    return make_prompt


@pytest.fixture
def answer() -> Callable[..., Answer]:
    return make_answer
