"""Products with weights packed for tiles: float32, as few rows as a decode step has or as many as a prefill.

With few rows a product takes as long as reading its weights from memory, if the next panel of them is
fetched while the present one is used. oneDNN takes up to twice as long from 4 to 32 rows, and is no faster
with hundreds.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from kaiseki.engines.embedded.compiled import F32, exp, kernel
from kaiseki.engines.embedded.tiles import COLUMNS, ROWS, add_tile, address

ROW_TILES = 16
"""Tiles of rows that share a panel while it is in the cache; their own inputs stay in the second level."""
DEPTH = 640
"""About the most of a panel that is used at once: 40 KiB."""
LINE = 4 * COLUMNS
"""Bytes of a panel per step of depth."""


def pack(weight: F32) -> F32:
    """[out, in] to panels, [out / COLUMNS rounded up, in, COLUMNS]; what is missing is zero."""
    size, depth = weight.shape
    padded = np.zeros((-(-size // COLUMNS) * COLUMNS, depth), np.float32)
    padded[:size] = weight
    return np.ascontiguousarray(padded.reshape(-1, COLUMNS, depth).transpose(0, 2, 1))


@kernel()
def pace_of(rows: int, tiles: int) -> int:
    """Bytes of the next panel to fetch per step, when these many tiles of rows share the present one.

    Processors fetch ahead by themselves when nothing else happens between two lines, as with one row.
    """
    return LINE // min(tiles, ROW_TILES) if rows > 2 else 0


@kernel(parallel=True)
def product(x: F32, weight: F32, start: F32, out: F32, parts: int) -> None:
    """Set `out` to start + x @ the transpose of the weight.

    Args:
        x: [rows, in].
        weight: from `pack`, [panels, in, COLUMNS].
        start: [rows, panels * COLUMNS], which may be `out` itself, or [1, panels * COLUMNS] for all rows.
        out: [rows, panels * COLUMNS].
        parts: how many threads take a share of the panels.
    """
    rows, depth = x.shape
    panels = weight.shape[0]
    tiles = (rows + ROWS - 1) // ROWS
    pieces = (depth + DEPTH - 1) // DEPTH
    pace = pace_of(rows, tiles)
    for part in prange(parts):
        for group in range(0, tiles, ROW_TILES):
            for piece in range(pieces):
                k, end = depth * piece // pieces, depth * (piece + 1) // pieces
                for panel in range(panels * part // parts, panels * (part + 1) // parts):
                    for tile in range(group, min(group + ROW_TILES, tiles)):
                        r, last = rows * tile // tiles, rows * (tile + 1) // tiles
                        column = panel * COLUMNS
                        if k == 0:
                            for row in range(r, last):
                                for i in range(column, column + COLUMNS):
                                    out[row, i] = start[row % start.shape[0], i]
                        at = address(weight[panel], k, 0)
                        add_tile(
                            last - r,
                            address(x, r, k),
                            depth,
                            at,
                            COLUMNS,
                            address(out, r, column),
                            out.shape[1],
                            end - k,
                            at + LINE * depth + (tile - group) * (end - k) * pace,
                            pace,
                        )


@kernel(parallel=True)
def gated_product(x: F32, weight: F32, out: F32, parts: int) -> None:
    """Set `out` to silu(x @ gate) * (x @ up), as gated MLPs begin.

    Args:
        x: [rows, in].
        weight: [panels, 2, in, COLUMNS], each panel of the gate's beside the same of up's.
        out: [rows, panels * COLUMNS].
        parts: how many threads take a share of the panels.
    """
    rows, depth = x.shape
    panels = weight.shape[0]
    tiles = (rows + ROWS - 1) // ROWS
    pace = pace_of(rows, tiles)
    for part in prange(parts):
        both = np.empty((2 * ROWS, COLUMNS), np.float32)
        for group in range(0, tiles, ROW_TILES):
            for panel in range(panels * part // parts, panels * (part + 1) // parts):
                for tile in range(group, min(group + ROW_TILES, tiles)):
                    r, last = rows * tile // tiles, rows * (tile + 1) // tiles
                    both[:] = 0
                    for side in range(2):
                        at = address(weight[panel, side], 0, 0)
                        add_tile(
                            last - r,
                            address(x, r, 0),
                            depth,
                            at,
                            COLUMNS,
                            address(both, side * ROWS, 0),
                            COLUMNS,
                            depth,
                            at + 2 * LINE * depth + (tile - group) * depth * pace,
                            pace,
                        )
                    for row in range(last - r):
                        for i in range(COLUMNS):
                            gate = both[row, i]
                            gated = gate / (np.float32(1) + exp(-gate))
                            out[r + row, panel * COLUMNS + i] = gated * both[ROWS + row, i]
