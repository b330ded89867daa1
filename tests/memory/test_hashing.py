from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiseki.memory import chain_hashes
from kaiseki.memory.hashing import join_digests

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.integers(1, 9), st.binary(max_size=3))
def test_each_digest_is_sha256_of_the_one_before_and_the_page(tokens, page, salt):
    parent, expected = b"", []
    for start in range(0, len(tokens) - page + 1, page):
        words = tokens[start : start + page]
        parent = hashlib.sha256(parent + salt + struct.pack(f"<{page}i", *words)).digest()
        expected.append(parent)
    assert chain_hashes(tokens, page, salt=salt) == tuple(expected)


@given(TOKENS, st.integers(1, 9), st.data())
def test_a_chain_can_be_continued(tokens, page, data):
    whole = chain_hashes(tokens, page, salt=b"x")
    cut = data.draw(st.integers(0, len(whole)))
    parent = whole[cut - 1] if cut else b""
    assert whole[:cut] + chain_hashes(tokens[cut * page :], page, parent, b"x") == whole


def test_any_integer_array_will_do():
    tokens = [3, 1, 4, 1, 5, 9]
    assert (
        chain_hashes(np.array(tokens, np.uint32), 2)
        == chain_hashes(np.array(tokens), 2)
        == chain_hashes(tokens, 2)
    )


def test_salt_keeps_chains_apart():
    assert not set(chain_hashes(range(64), 16, salt=b"a")) & set(chain_hashes(range(64), 16, salt=b"b"))


def test_bad_sizes_are_errors():
    with pytest.raises(ValueError, match="block_tokens"):
        chain_hashes([1], 0)
    with pytest.raises(ValueError, match="32 bytes"):
        join_digests((b"x" * 32, b"x" * 31))
