"""What the engine keeps of a request while it has a row."""

from __future__ import annotations

import secrets

import numpy as np

from kaiseki.core.decision import I32
from kaiseki.core.reasons import Finish
from kaiseki.engines.embedded.text import TextCodec, TextStream
from kaiseki.engines.embedded.work import GenerationWork

NO_EPOCH = -1


class RowState:
    """Token ids by position, the text so far, and how the row ended in which epoch.

    A token is written *at the position its chunk ends at* (`put`), never appended. A token that was
    sampled in a step whose result the core then dropped, because it preempted the row meanwhile, is
    overwritten when the recomputed row gets to that position, and nothing reads it before: chunks of
    the new epoch only cover positions before the one they sample. The text follows the same rule: it
    is made again from the tokens when it is ahead of the position.

    Only the thread that runs steps touches what changes here.
    """

    def __init__(self, work: GenerationWork, codec: TextCodec, eos: frozenset[int]) -> None:
        """A row before its first chunk. `eos` are the model's end-of-sequence tokens.

        Raises:
            ValueError: the prompt is empty.
        """
        self.sampling = work.sampling
        prompt = np.asarray(work.prompt_ids, np.int32)
        self.prompt = int(prompt.size)
        if not self.prompt:
            raise ValueError("a prompt needs at least one token")
        self.tokens: I32 = np.zeros(self.prompt + self.sampling.max_tokens, np.int32)
        self.tokens[: self.prompt] = prompt
        self.ending = frozenset(self.sampling.stop_token_ids) | (
            frozenset() if self.sampling.ignore_eos else eos
        )
        self.seed = secrets.randbits(62) if self.sampling.seed is None else self.sampling.seed
        self.finished_in = NO_EPOCH
        self.failed_in = NO_EPOCH
        self._codec = codec
        self._text = self._new_text()

    def chunk(self, start: int, tokens: int) -> I32:
        """int32[tokens], the ids at positions start, start + 1, ..."""
        return self.tokens[start : start + tokens]

    def history(self, position: int) -> I32:
        """int32[position], the ids before a position."""
        return self.tokens[:position]

    def outputs(self, position: int) -> I32:
        """int32[position - prompt], the output ids before a position."""
        return self.tokens[self.prompt : position]

    def put(self, position: int, token: int) -> tuple[str, Finish]:
        """Write the token sampled for a position.

        Returns:
            The text it releases and whether the output ends with it.
        """
        self.tokens[position] = token
        count = position - self.prompt + 1
        ends = token in self.ending
        text = self._text_before(position)
        may_stop = count >= self.sampling.min_tokens
        delta = text.push(token, visible=not ends or not self.sampling.skip_special_tokens, may_stop=may_stop)
        if ends or text.stopped:
            return delta + text.finish(), Finish.STOP
        if count >= self.sampling.max_tokens:
            return delta + text.finish(), Finish.LENGTH
        return delta, Finish.NONE

    def _new_text(self) -> TextStream:
        return TextStream(
            self._codec,
            self.tokens[: self.prompt].tolist(),
            self.sampling.stop,
            skip_special=self.sampling.skip_special_tokens,
        )

    def _text_before(self, position: int) -> TextStream:
        """The text stream after exactly the outputs before a position."""
        if self._text.count != position - self.prompt:
            self._text = self._new_text()
            for count, token in enumerate(self.outputs(position), 1):
                self._text.push(int(token), may_stop=count >= self.sampling.min_tokens)
        return self._text
