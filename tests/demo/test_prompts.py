"""Real prompts: enough of them, different from each other, the same for the same seed."""

from __future__ import annotations

import numpy as np

from kaiseki.demo.documents import LEAST_CHARACTERS, documents
from kaiseki.demo.prompts import BATCH, CLASSES, DOCUMENT_TOKENS, INTERACTIVE, OUTPUT_TOKENS, PromptMaker
from kaiseki.demo.questions import QUESTIONS


def test_there_are_many_questions_and_documents():
    assert len(set(QUESTIONS)) == len(QUESTIONS) >= 60
    assert all(5 <= len(question.split()) <= 40 for question in QUESTIONS)
    texts = documents()
    assert len(set(texts)) > 300
    assert min(map(len, texts)) >= LEAST_CHARACTERS


def test_prompts_depend_on_the_seed_alone(encode):
    first, again, other = (PromptMaker(encode, seed) for seed in (1, 1, 2))
    classes = [INTERACTIVE, BATCH, BATCH, INTERACTIVE]
    made = [first.make(cls) for cls in classes]
    assert made == [again.make(cls) for cls in classes]
    assert made != [other.make(cls) for cls in classes]


def test_no_two_prompts_begin_alike(encode):
    maker = PromptMaker(encode, 3)
    prompts = [maker.make(cls) for _ in range(len(QUESTIONS) + 20) for cls in CLASSES]
    assert len({prompt.messages[0]["content"][:12] for prompt in prompts}) == len(prompts)


def test_lengths_are_in_range(encode):
    maker = PromptMaker(encode, 4)
    for cls in CLASSES:
        low, high = OUTPUT_TOKENS[cls]
        assert all(low <= maker.make(cls).output_tokens <= high for _ in range(50))
    long = [maker.make(BATCH).prompt_tokens for _ in range(50)]
    assert max(long) <= DOCUMENT_TOKENS[1] + 20
    assert np.median(long) > DOCUMENT_TOKENS[0] / 2  # a word is longer than a real token
