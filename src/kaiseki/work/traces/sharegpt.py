"""ShareGPT conversations, one JSON array: texts without times, so arrivals come from a generator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from kaiseki.work.batches import MAX_TOKENS
from kaiseki.work.traces.errors import Spot

READ_CHARACTERS = 1 << 18
MAX_CONVERSATION_CHARACTERS = 64 << 20
BYTES_PER_TOKEN = 4
ASKING = ("human", "user", "system")
ANSWERING = ("gpt", "chatgpt", "assistant", "bing", "bard")

CountTokens = Callable[[str], int]


def estimate_tokens(text: str) -> int:
    """Tokens of a text by its UTF-8 length, four bytes each: about right for English and code."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def conversations(path: Path, count_tokens: CountTokens = estimate_tokens) -> Iterator[list[tuple[int, int]]]:
    """The turns of each conversation that has an answer: new prompt tokens and output tokens, >= 1 each.

    New tokens are those since the last answer; what comes before the first question counts with it.

    Raises:
        OSError: the file can't be read.
        TraceError: it is wrong somewhere, or has no conversation with an answer.
    """
    found = False
    for spot, item in _items(path):
        turns = _turns(spot, item, count_tokens)
        if turns:
            found = True
            yield turns
    if not found:
        raise Spot(str(path), 1).error("file", "no answers", "at least one conversation with an answer")


def _turns(spot: Spot, item: Any, count_tokens: CountTokens) -> list[tuple[int, int]]:
    messages = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(messages, list):
        raise spot.error("conversations", messages, "a list of messages")
    turns: list[tuple[int, int]] = []
    new_tokens, asked = 0, False
    for message in messages:
        who, text = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
        if not isinstance(text, str):
            raise spot.error("value", text, "the text of a message")
        tokens = count_tokens(text)
        if who in ANSWERING and asked:
            turns.append((max(new_tokens, 1), max(tokens, 1)))
            new_tokens, asked = 0, False
        elif who in ASKING or who in ANSWERING:
            new_tokens += tokens
            asked = asked or who in ("human", "user")
        else:
            raise spot.error("from", who, ", ".join(ASKING + ANSWERING))
    if sum(map(sum, turns)) > MAX_TOKENS:
        raise spot.error("conversations", f"{sum(map(sum, turns))} tokens", f"at most {MAX_TOKENS} in all")
    return turns


def _items(path: Path) -> Iterator[tuple[Spot, Any]]:
    """The elements of the array and where each begins."""
    with path.open(encoding="utf-8-sig") as file:
        array = _Array(str(path), file)
        if not array.at("["):
            raise array.spot().error("file", array.text[:40], "a JSON array of conversations")
        array.drop(1)
        while not array.at("]"):
            spot = array.spot()
            yield spot, array.decode(spot)


class _Array:
    """The text of an array that is read piece by piece."""

    def __init__(self, name: str, file: TextIO) -> None:
        self.name = name
        self.file = file
        self.text = ""
        self.line = 1
        self.decoder = json.JSONDecoder()

    def spot(self) -> Spot:
        return Spot(self.name, self.line)

    def at(self, bracket: str) -> bool:
        """Whether a bracket comes next, after white space and commas."""
        while True:
            self.drop(len(self.text) - len(self.text.lstrip(" \t\r\n,")))
            if self.text:
                return self.text[0] == bracket
            if not self._read(READ_CHARACTERS):
                raise self.spot().error("file", "its end", "a JSON array of conversations, closed by ']'")

    def drop(self, characters: int) -> None:
        self.line += self.text.count("\n", 0, characters)
        self.text = self.text[characters:]

    def decode(self, spot: Spot) -> Any:
        """The next element; a long one is read in doubling steps, not to be decoded over and over."""
        while True:
            try:
                item, end = self.decoder.raw_decode(self.text)
            except (ValueError, RecursionError) as error:
                if len(self.text) > MAX_CONVERSATION_CHARACTERS:
                    allowed = f"JSON of at most {MAX_CONVERSATION_CHARACTERS} characters each ({error})"
                    raise spot.error("conversation", self.text[:100], allowed) from None
                if not self._read(max(READ_CHARACTERS, len(self.text))):
                    raise spot.error("conversation", self.text[:100], f"complete JSON ({error})") from None
            else:
                self.drop(end)
                return item

    def _read(self, characters: int) -> bool:
        try:
            piece = self.file.read(characters)
        except UnicodeDecodeError as error:
            shown = error.object[error.start : error.start + 20]
            raise self.spot().error("text", shown, "UTF-8") from None
        self.text += piece
        return piece != ""
