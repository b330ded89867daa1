"""Digests of full KV blocks, chained so that one digest names a whole prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32


def chain_hashes(
    token_ids: npt.ArrayLike, block_tokens: int, parent: bytes = b"", salt: bytes = b""
) -> tuple[bytes, ...]:
    """SHA-256 digests of the full blocks of `token_ids`; a last partial block has none.

    Digest i is `sha256(digest i-1 + salt + tokens of block i as little-endian int32)`, so equal
    digests mean equal tokens from position 0 on. The first block has `parent` in the place of the
    digest before it; to go on with a chain, pass its last digest.

    Args:
        token_ids: token ids, each in [0, 2**31); a one-dimensional array or any sequence.
        block_tokens: tokens per block, >= 1.
        parent: digest of the block before the first token; empty at position 0.
        salt: keeps chains apart that must not share KV: tenant, adapter, model. The salts of one
            pool should have one length (or be digests), so that none can pass for another plus tokens.

    Returns:
        `len(token_ids) // block_tokens` digests of 32 bytes.

    Raises:
        ValueError: block_tokens is below 1.

    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    data = np.ascontiguousarray(token_ids, "<i4").tobytes()
    width = 4 * block_tokens
    digests: list[bytes] = []
    for end in range(width, len(data) + 1, width):
        parent = hashlib.sha256(parent + salt + data[end - width : end]).digest()
        digests.append(parent)
    return tuple(digests)


def join_digests(digests: Sequence[bytes]) -> bytes:
    """The digests one after the other.

    Raises:
        ValueError: they are not 32 bytes long each. Lengths that only add up to that go unnoticed.
    """
    joined = b"".join(digests)
    if len(joined) != DIGEST_BYTES * len(digests):
        raise ValueError(f"a block digest has {DIGEST_BYTES} bytes")
    return joined
