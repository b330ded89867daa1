"""Attention of chunks on CPUs: tiles of query rows against one KV head of one sequence.

The keys of a head are copied once, transposed, to where tiles can read them; with more than a few
queries per key that costs little. Rows of a tile are queries that share the KV head, in the order of
their tokens: row r is query head r % group of the chunk's token r // group.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import prange

from kaiseki.core.decision import I32
from kaiseki.engines.embedded.attention.kernels import exp_sum, widen
from kaiseki.engines.embedded.compiled import F32, Elements, kernel
from kaiseki.engines.embedded.tiles import COLUMNS, ROWS, add_tile, address

CHUNK, HEAD, ROW, COUNT = 0, 1, 2, 3
"""Columns of an item: index of the chunk, KV head, first row of the tile, number of rows."""
OWNER, FIRST, START, END = 0, 1, 2, 3
"""Columns of a chunk: row in the block tables, first token in the forward, tokens before, and with it."""


def items_of(chunks: I32, kv_heads: int, group: int) -> I32:
    """int32[m, 4], every tile of every chunk; those of one chunk and head stand together."""
    found: list[npt.NDArray[np.int32]] = []
    for i, (_, _, start, end) in enumerate(chunks.tolist()):
        rows = (end - start) * group
        bounds = np.arange(-(-rows // ROWS) + 1) * rows // -(-rows // ROWS)
        made = np.empty((kv_heads, bounds.size - 1, 4), np.int32)
        made[:, :, CHUNK] = i
        made[:, :, HEAD] = np.arange(kv_heads)[:, None]
        made[:, :, ROW] = bounds[:-1]
        made[:, :, COUNT] = np.diff(bounds)
        found.append(made.reshape(-1, 4))
    return np.concatenate(found) if found else np.empty((0, 4), np.int32)


def ends_of(items: I32, chunks: I32, group: int) -> I32:
    """int32[m], how many positions the last row of each item attends to."""
    last = items[:, ROW] + items[:, COUNT] - 1
    ends: I32 = chunks[items[:, CHUNK], START] + last // group + 1
    return ends


@kernel()
def gather_keys(pool: Elements, table: I32, head: int, end: int, out: F32) -> None:
    """Copy keys of positions [0, end) transposed, COLUMNS positions per panel.

    pool: a layer's [blocks, kv_heads, block_tokens, head_dim]; out: [panels, head_dim, COLUMNS], of
    which positions past the end keep what they hold.
    """
    block_tokens, dim = pool.shape[2], pool.shape[3]
    for position in range(end):
        block, offset = table[position // block_tokens], position % block_tokens
        panel, column = position // COLUMNS, position % COLUMNS
        for d in range(dim):
            out[panel, d, column] = widen(pool[block, head, offset, d])


@kernel()
def gather_values(pool: Elements, table: I32, head: int, end: int, out: F32) -> None:
    """Copy values of positions [0, end) to out: [positions, width], width at least head_dim."""
    block_tokens, dim = pool.shape[2], pool.shape[3]
    for position in range(end):
        block, offset = table[position // block_tokens], position % block_tokens
        for d in range(dim):
            out[position, d] = widen(pool[block, head, offset, d])


@kernel()
def attend_tile(
    query: F32, keys: F32, values: F32, start: int, row: int, group: int, weights: F32, out: F32
) -> None:
    """Attention of a tile's rows.

    Args:
        query: [rows, head_dim], multiplied by the scale already.
        keys: from `gather_keys`.
        values: from `gather_values`.
        start: positions before the chunk.
        row: the first row's number in the chunk.
        group: query heads per KV head.
        weights: [rows, positions], scratch.
        out: [rows, width].
    """
    rows, dim = query.shape
    end = start + (row + rows - 1) // group + 1
    for panel in range((end + COLUMNS - 1) // COLUMNS):
        first = panel * COLUMNS
        for r in range(rows):
            for i in range(first, first + COLUMNS):
                weights[r, i] = np.float32(0)
        add_tile(
            rows,
            address(query, 0, 0),
            dim,
            address(keys[panel], 0, 0),
            COLUMNS,
            address(weights, 0, first),
            weights.shape[1],
            dim,
            address(keys[panel], dim, 0),
            4 * COLUMNS,
        )
    for r in range(rows):
        own = start + (row + r) // group + 1
        most = weights[r, 0]
        for i in range(own):
            most = max(most, weights[r, i])
        inverse = np.float32(1) / exp_sum(weights[r], own, most)
        for i in range(own):
            weights[r, i] *= inverse
        for i in range(own, end):
            weights[r, i] = np.float32(0)
        for i in range(out.shape[1]):
            out[r, i] = np.float32(0)
    width = out.shape[1]
    for column in range(0, width, COLUMNS):
        add_tile(
            rows,
            address(weights, 0, 0),
            weights.shape[1],
            address(values, 0, column),
            width,
            address(out, 0, column),
            width,
            end,
            address(values, 0, column),
            4 * width,
        )


@kernel(parallel=True)
def attend_chunks(
    query: F32,
    keys: Elements,
    values: Elements,
    chunks: I32,
    items: I32,
    tables: I32,
    cuts: I32,
    scale: np.float32,
    out: F32,
) -> None:
    """Causal attention of chunks to their sequences in the pool, the chunks' own K and V included.

    Args:
        query, out: [T, heads, head_dim].
        keys, values: a layer's pool.
        chunks: int32[c, 4]; see OWNER, FIRST, START, END.
        items: from `items_of`.
        tables: int32[n, max_blocks].
        cuts: int32[parts + 1]: part p, run by one thread, does items cuts[p] to cuts[p + 1].
        scale: factor on query-key products.
    """
    kv_heads, dim = keys.shape[1], keys.shape[3]
    group = query.shape[1] // kv_heads
    longest = 0
    for chunk in range(chunks.shape[0]):
        longest = max(longest, chunks[chunk, END])
    panels = (longest + COLUMNS - 1) // COLUMNS
    width = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
    for part in prange(cuts.shape[0] - 1):
        head_keys = np.empty((panels, dim, COLUMNS), np.float32)
        head_values = np.empty((panels * COLUMNS, width), np.float32)
        weights = np.empty((ROWS, panels * COLUMNS), np.float32)
        rows = np.empty((ROWS, dim), np.float32)
        sums = np.empty((ROWS, width), np.float32)
        held_chunk, held_head = -1, -1
        for item in range(cuts[part], cuts[part + 1]):
            chunk, head, row, count = (
                items[item, CHUNK],
                items[item, HEAD],
                items[item, ROW],
                items[item, COUNT],
            )
            owner, first, start = chunks[chunk, OWNER], chunks[chunk, FIRST], chunks[chunk, START]
            if chunk != held_chunk or head != held_head:
                gather_keys(keys, tables[owner], head, chunks[chunk, END], head_keys)
                gather_values(values, tables[owner], head, chunks[chunk, END], head_values)
                held_chunk, held_head = chunk, head
            for r in range(count):
                token, source = first + (row + r) // group, head * group + (row + r) % group
                for d in range(dim):
                    rows[r, d] = query[token, source, d] * scale
            attend_tile(rows[:count], head_keys, head_values, start, row, group, weights, sums)
            for r in range(count):
                token, target = first + (row + r) // group, head * group + (row + r) % group
                for d in range(dim):
                    out[token, target, d] = sums[r, d]
