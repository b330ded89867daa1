"""Text that grows token by token, and stop strings in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kaiseki.engines.embedded.text import TextCodec, TextStream

TEXT = "naïve café, 懐石 — 🍱🍣 and so on"


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer)


def test_characters_come_out_whole(codec: TextCodec) -> None:
    stream = TextStream(codec)
    pieces = [stream.push(token) for token in codec.encode(TEXT)]
    assert len(pieces) > len(TEXT)
    assert "".join(pieces) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_an_incomplete_character_at_the_end_is_left_out(codec: TextCodec) -> None:
    stream = TextStream(codec)
    pieces = [stream.push(token) for token in codec.encode("ok 🍱")[:-1]]
    assert "".join(pieces) + stream.finish() == "ok "


def test_any_bytes_come_out_as_the_decoder_writes_them(codec: TextCodec) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = [*rng.integers(0, 256, 30).tolist(), *codec.encode("end")]
        stream = TextStream(codec, prompt=codec.encode("prompt"))
        assert "".join(stream.push(i) for i in ids) == codec.decode(ids)


def test_a_stop_string_across_tokens_is_cut(codec: TextCodec) -> None:
    stream = TextStream(codec, stop=("END", "</s>"))
    pieces = []
    for token in codec.encode("an ENTRY, the E N D</b> and </s>never"):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    assert "".join(pieces) == "an ENTRY, the E N D</b> and "


def test_what_may_begin_a_stop_string_is_held_back(codec: TextCodec) -> None:
    stream = TextStream(codec, stop=("abcd",))
    assert [stream.push(t) for t in codec.encode("xabcabcx")] == ["x", "", "", "", "abc", "", "", "abcx"]
    assert [stream.push(t) for t in codec.encode("yab")] == ["y", "", ""]
    assert stream.finish() == "ab"


def test_the_first_of_several_stop_strings_counts(codec: TextCodec) -> None:
    stream = TextStream(codec, stop=("later", "ate"))
    text = "".join(stream.push(t) for t in codec.encode("too late"))
    assert (text, stream.stopped) == ("too l", True)


def test_chat_templates(codec: TextCodec, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match="no chat template"):
        codec.render_chat(messages)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    assert codec.decode(codec.render_chat(messages)) == "[user]hello[assistant]"
    tokenizer.chat_template = "{{ raise_exception('only one turn, please') }}"
    with pytest.raises(ValueError, match="only one turn"):
        codec.render_chat(messages)
