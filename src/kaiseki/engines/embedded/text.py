"""Between text and token ids: encoding, chat templates, and text that grows token by token."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are not (yet) a UTF-8 character."""
CONTEXT_TOKENS = 5
"""Prompt tokens decoded with the first output tokens, so that a leading space is not lost."""


class TextCodec:
    """A Hugging Face tokenizer that several threads may use."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a `PreTrainedTokenizerBase`."""
        self.tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts around a prompt."""
        with self._lock:
            return list(self.tokenizer.encode(text, add_special_tokens=special))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            ValueError: the model has no chat template, or it does not take these messages.
        """
        if not self.tokenizer.chat_template:
            raise ValueError("this model has no chat template; use text completions")
        try:
            with self._lock:
                ids = self.tokenizer.apply_chat_template(
                    [dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=False
                )
        except Exception as error:  # templates raise whatever they like
            raise ValueError(f"the chat template refused these messages: {error}") from error
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids, without any tidying up of spaces."""
        with self._lock:
            return str(
                self.tokenizer.decode(
                    list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
                )
            )


class TextStream:
    """The text of one output, released piece by piece.

    Tokens are decoded in a short window, since the text of a token depends on its neighbours; text that
    ends inside a character is held back, and so is the longest tail that may begin a stop string.
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        skip_special: bool = True,
    ) -> None:
        """Nothing has been output yet. The prompt's end is context for the first token's text."""
        self._codec = codec
        self._stop = tuple(stop)
        self._skip = skip_special
        self._ids = [int(i) for i in prompt[-CONTEXT_TOKENS:]]
        self._window = 0
        self._decoded = len(self._ids)
        self._held = ""
        self.count = 0
        self.stopped = False

    def push(self, token: int, *, visible: bool = True, may_stop: bool = True) -> str:
        """Add a token and return the text it releases; `stopped` tells whether a stop string came up.

        An invisible token (one that ends the output) has no text of its own.
        """
        self._ids.append(token)
        self.count += 1
        if not visible:
            return ""
        self._held += self._fresh()
        if may_stop and self._cut():
            released, self._held = self._held, ""
            return released
        keep = self._partial_stop()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released

    def finish(self) -> str:
        """What was held back, at the end of an output; an incomplete character is left out."""
        released, self._held = self._held, ""
        return released

    def _fresh(self) -> str:
        """Text of the tokens not yet decoded, empty if it ends inside a character."""
        before = self._codec.decode(self._ids[self._window : self._decoded], skip_special=self._skip)
        after = self._codec.decode(self._ids[self._window :], skip_special=self._skip)
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._window, self._decoded = self._decoded, len(self._ids)
        return after[len(before) :]

    def _cut(self) -> bool:
        """Cut the held text at the first stop string in it, if there is one."""
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True
        return self.stopped

    def _partial_stop(self) -> int:
        """Length of the longest tail of the held text that is a proper beginning of a stop string."""
        return max(
            (
                n
                for s in self._stop
                for n in range(1, min(len(s) - 1, len(self._held)) + 1)
                if self._held.endswith(s[:n])
            ),
            default=0,
        )
