"""The same output under any schedule: chunk sizes, company, pipeline depth, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kaiseki.core.reasons import Finish
from kaiseki.engines.embedded.rows import RowState

FAMILIES = ["llama", "qwen2", "qwen3", "smollm3"]


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@dataclass
class Sequence:
    """One request under a random schedule, as the core would track it."""

    prompt: list[int]
    max_tokens: int
    known: list[int] = field(default_factory=list)
    computed: int = 0
    sampled: int = 0
    done: bool = False

    @property
    def unscheduled(self) -> int:
        """Tokens that have an id, or will have one once what is in flight is done, and no KV."""
        return len(self.prompt) + self.sampled - self.computed


class RandomScheduler:
    """Random rows, chunk sizes and preemptions; keeps `depth` decisions in flight."""

    def __init__(self, hand: Any, seed: int, depth: int) -> None:
        self.hand, self.rng, self.depth = hand, np.random.default_rng(seed), depth
        self.sequences: dict[int, Sequence] = {}
        self.flying: deque[tuple[list[Any], dict[int, int]]] = deque()
        self.preemptions = 0

    def run(self) -> None:
        for _ in range(1000):
            if not self.flying and all(s.done for s in self.sequences.values()):
                break
            if self.rng.random() < 0.15:
                self.preempt()
            chunks = self.choose()
            if chunks:
                self.hand.execute(chunks)
                self.flying.append((chunks, dict(self.hand.epochs)))
            if self.flying and (len(self.flying) > self.depth or not chunks):
                self.apply()

    def choose(self) -> list[tuple[int, int, int, bool]]:
        chunks = []
        for row, s in self.sequences.items():
            if s.done or s.unscheduled == 0 or s.sampled > s.max_tokens or self.rng.random() < 0.3:
                continue
            n = int(min(s.unscheduled, self.rng.integers(1, 12)))
            samples = n == s.unscheduled and s.sampled < s.max_tokens
            if n == s.unscheduled and not samples:
                continue
            chunks.append((row, s.computed, n, samples))
            s.computed += n
            s.sampled += samples
        return chunks

    def preempt(self) -> None:
        alive = [row for row, s in self.sequences.items() if not s.done and s.computed]
        if alive:
            row = int(self.rng.choice(alive))
            s = self.sequences[row]
            self.hand.epochs[row] += 1
            s.computed, s.sampled = 0, len(s.known)
            self.preemptions += 1

    def apply(self) -> None:
        chunks, epochs = self.flying.popleft()
        result = self.hand.engine.collect()
        assert not result.failed.any(), result.message
        ids = iter(result.token_ids.tolist())
        for i, (row, *_) in enumerate(chunks):
            fresh = [next(ids) for _ in range(int(result.new_tokens[i]))]
            s = self.sequences[row]
            if epochs[row] == self.hand.epochs[row] and not s.done:
                s.known += fresh
                s.done = result.finish[i] != Finish.NONE


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_schedules_give_the_output_of_transformers(
    hand: Callable[..., Any], family: str, depth: int
) -> None:
    played = hand(family, depth=depth)
    preemptions = 0
    for seed in range(3):
        scheduler = run_random(played, seed, depth)
        preemptions += scheduler.preemptions
        for s in scheduler.sequences.values():
            assert s.known == played.expected(s.prompt, 12)
    assert preemptions


def run_random(played: Any, seed: int, depth: int) -> RandomScheduler:
    scheduler = RandomScheduler(played, seed, depth)
    for row in range(6):
        prompt = prompt_of(5 + 9 * row, seed * 10 + row)
        scheduler.sequences[row] = Sequence(prompt, 12)
        played.open(row, prompt, max_tokens=12)
    scheduler.run()
    return scheduler


def test_random_schedules_notice_stale_tokens(
    hand: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that appends tokens, instead of writing them where they belong, must not pass."""
    put = RowState.put

    def append(state: Any, position: int, token: int) -> Any:
        state.length = getattr(state, "length", state.prompt) + 1
        return put(state, min(state.length, state.tokens.size) - 1, token)

    monkeypatch.setattr(RowState, "put", append)
    played = hand(depth=1)
    sequences = [s for seed in range(3) for s in run_random(played, seed, 1).sequences.values()]
    assert any(s.known != played.expected(s.prompt, 12) for s in sequences)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 7, 16])
def test_chunk_sizes_do_not_matter(hand: Callable[..., Any], output: Any, chunk: int) -> None:
    played, prompt = hand(), prompt_of(37, 3)
    played.open(0, prompt, max_tokens=3)
    out = output()
    for start in range(0, 37, chunk):
        n = min(chunk, 37 - start)
        result = played.step([(0, start, n, start + n == 37)])
        assert result.new_tokens.tolist() == [int(start + n == 37)]
        out.add(result, 0)
    while not out.finish:
        out.add(played.step([(0, 36 + len(out.ids), 1, True)]), 0)
    assert out.ids == played.expected(prompt, 3)


def test_copied_blocks_continue_another_sequence(hand: Callable[..., Any], output: Any) -> None:
    """Copy-on-write: the second row gets the first one's blocks by copy, and computes one token."""
    played, prompt = hand(), prompt_of(10, 4)
    played.open(0, prompt, max_tokens=4)
    played.step([(0, 0, 10, True)])
    played.open(1, prompt, max_tokens=4)
    blocks = played.tables.blocks
    out = output()
    out.add(played.step([(1, 9, 1, True)], [(blocks[0, i], blocks[1, i]) for i in range(3)]), 0)
    while not out.finish:
        out.add(played.step([(1, 9 + len(out.ids), 1, True)]), 0)
    assert out.ids == played.expected(prompt, 4)


def test_a_stale_token_is_not_kept(hand: Callable[..., Any], output: Any) -> None:
    """Depth 1: a row is preempted while a step that samples for it is in flight."""
    played, prompt = hand(depth=1), prompt_of(6, 5)
    expected = played.expected(prompt, 5)
    played.open(0, prompt, max_tokens=5)
    out = output()
    played.execute([(0, 0, 6, True)])
    played.execute([(0, 6, 1, True)])
    out.add(played.engine.collect(), 0)
    played.epochs[0] += 1
    played.execute([(0, 0, 4, False)])
    played.engine.collect()  # token 2, sampled for the old epoch: the core drops it
    assert out.ids == expected[:1]
    played.execute([(0, 4, 3, True)])
    assert played.engine.collect().new_tokens.tolist() == [0]
    while not out.finish:
        out.add(played.engine.collect(), 0)
        if not out.finish:
            played.execute([(0, 6 + len(out.ids) - 1, 1, True)])
    assert out.ids == expected
    assert out.text == played.engine.codec.decode(expected)


def test_a_stale_finish_does_not_end_the_row(hand: Callable[..., Any], output: Any) -> None:
    played, prompt = hand(depth=1), prompt_of(6, 5)
    last = played.expected(prompt, 3)[2]
    played.open(0, prompt, max_tokens=8, stop_token_ids=(last,))
    out = output()
    for chunk in ((0, 0, 6, True), (0, 6, 1, True)):
        played.execute([chunk])
        out.add(played.engine.collect(), 0)
    played.execute([(0, 7, 1, True)])
    played.epochs[0] += 1
    played.execute([(0, 0, 8, True)])
    assert played.engine.collect().finish.tolist() == [Finish.STOP]  # stale
    out.add(played.engine.collect(), 0)
    assert out.ids == played.expected(prompt, 3)
    assert out.finish == Finish.STOP


def test_a_finished_row_is_skipped_in_the_step_already_in_flight(hand: Callable[..., Any]) -> None:
    played, prompt = hand(depth=1), prompt_of(6, 7)
    first = played.expected(prompt, 1)[0]
    played.open(0, prompt, stop_token_ids=(first,))
    played.open(1, prompt, max_tokens=2)
    played.execute([(0, 0, 6, True), (1, 0, 6, True)])
    played.execute([(0, 6, 1, True), (1, 6, 1, True)])
    result = played.engine.collect()
    assert result.finish.tolist() == [Finish.STOP, Finish.NONE]
    result = played.engine.collect()
    assert result.new_tokens.tolist() == [0, 1]
    assert result.finish.tolist() == [Finish.NONE, Finish.LENGTH]
    assert result.token_ids.tolist() == played.expected(prompt, 2)[1:]


def test_a_recycled_row_starts_afresh(hand: Callable[..., Any]) -> None:
    """Closed and opened again while its last step is in flight."""
    played = hand(depth=1)
    old, new = prompt_of(6, 8), prompt_of(9, 9)
    played.open(0, old)
    played.execute([(0, 0, 6, True)])
    played.engine.close(0)
    played.open(0, new)
    played.execute([(0, 0, 9, True)])
    assert played.engine.collect().epochs.tolist() == [0]
    result = played.engine.collect()
    assert result.epochs.tolist() == [1]
    assert result.token_ids.tolist() == played.expected(new, 1)


def test_tables_are_read_before_execute_returns(hand: Callable[..., Any]) -> None:
    played, prompt = hand(depth=1), prompt_of(12, 10)
    played.open(0, prompt, max_tokens=2)
    played.execute([(0, 0, 12, True)])
    played.execute([(0, 12, 1, True)])
    played.tables.blocks[0] = 0
    ids = [played.engine.collect().token_ids.tolist() for _ in range(2)]
    assert ids == [[t] for t in played.expected(prompt, 2)]
