"""The innermost loop of all products: up to 6 x 16 sums kept in vector registers.

Neither Numba nor LLVM finds this form from loops over arrays, so it is written as LLVM vector code, for
no processor in particular: 12 registers of 8 floats for the sums are what AVX2 has room for, and wider or
narrower registers are LLVM's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kaiseki.engines.embedded.compiled import Elements, kernel

ROWS = 6
"""Most rows of a tile."""
COLUMNS = 16
"""Columns of a tile."""
LANES = 8

INDEX = ir.IntType(64)
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
SAME_LANE = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
NOTHING = ir.Constant(VECTOR, ir.Undefined)
FUSED = ("contract",)


def _tile_of(rows: int) -> Any:
    """An intrinsic function for tiles of exactly this many rows; see `add_tile`."""

    @intrinsic
    def tile(
        context: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        b_stride: Any,
        c: Any,
        c_stride: Any,
        n: Any,
        ahead: Any,
        pace: Any,
    ) -> Any:
        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            *operands, ahead, pace = arguments

            def fetch_next(k: Any) -> None:
                _fetch(build, build.add(ahead, build.mul(k, pace)))

            _write_tile(build, rows, fetch_next, *operands)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), generate

    return tile


def _write_tile(
    build: Any,
    rows: int,
    beside: Callable[[Any], None],
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
    n: Any,
) -> None:
    """Append the loop of `add_tile` to a function that is being built, with what `beside` writes in it."""
    a, b, c = (build.inttoptr(address, FLOAT.as_pointer()) for address in (a, b, c))
    a_rows = [build.gep(a, [build.mul(a_stride, INDEX(r))]) for r in range(rows)]
    c_rows = [build.gep(c, [build.mul(c_stride, INDEX(r))]) for r in range(rows)]
    targets = [pointer for row in c_rows for pointer in _vectors(build, row)]
    before = [build.load(pointer, align=4) for pointer in targets]
    entry, loop, after = build.block, build.append_basic_block(), build.append_basic_block()
    build.branch(loop)
    build.position_at_end(loop)
    k = build.phi(INDEX)
    sums = [build.phi(VECTOR) for _ in targets]
    columns = [build.load(p, align=4) for p in _vectors(build, build.gep(b, [build.mul(k, b_stride)]))]
    beside(k)
    added = []
    for r, row in enumerate(a_rows):
        factor = build.insert_element(NOTHING, build.load(build.gep(row, [k])), ir.IntType(32)(0))
        factor = build.shuffle_vector(factor, NOTHING, SAME_LANE)
        for column, total in zip(columns, sums[r * len(columns) :], strict=False):
            added.append(build.fadd(build.fmul(factor, column, flags=FUSED), total, flags=FUSED))
    following = build.add(k, INDEX(1))
    for phi, first, later in zip([k, *sums], [INDEX(0), *before], [following, *added], strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(later, loop)
    build.cbranch(build.icmp_signed("<", following, n), loop, after)
    build.position_at_end(after)
    for pointer, total in zip(targets, added, strict=True):
        build.store(total, pointer, align=4)


def _fetch(build: Any, address: Any) -> None:
    """Have memory at an address brought to the second-level cache meanwhile."""
    pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
    fetch = build.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
    read, second_level, data = flag(0), flag(2), flag(1)
    build.call(fetch, [build.inttoptr(address, pointer), read, second_level, data])


def _vectors(build: Any, start: Any) -> list[Any]:
    """Pointers to the vectors of one row of a tile that starts at a pointer to float."""
    return [
        build.bitcast(build.gep(start, [INDEX(first)]), VECTOR.as_pointer())
        for first in range(0, COLUMNS, LANES)
    ]


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_tile_of(rows) for rows in range(1, ROWS + 1))


@kernel()
def add_tile(
    rows: int,
    a: int,
    a_stride: int,
    b: int,
    b_stride: int,
    c: int,
    c_stride: int,
    n: int,
    ahead: int,
    pace: int,
) -> None:
    """Add a @ b to c, with a: [rows, n], b: [n, COLUMNS], c: [rows, COLUMNS], all float32.

    Args:
        rows: 1 to ROWS.
        a, b, c: addresses of the first elements; see `address`.
        a_stride, b_stride, c_stride: elements from one row to the next.
        n: at least 1.
        ahead: address of memory that will be needed next; need not be valid.
        pace: bytes of it to fetch per step of n.
    """
    if rows == 6:
        _tile_6(a, a_stride, b, b_stride, c, c_stride, n, ahead, pace)
    elif rows == 5:
        _tile_5(a, a_stride, b, b_stride, c, c_stride, n, ahead, pace)
    elif rows == 4:
        _tile_4(a, a_stride, b, b_stride, c, c_stride, n, ahead, pace)
    elif rows == 3:
        _tile_3(a, a_stride, b, b_stride, c, c_stride, n, ahead, pace)
    elif rows == 2:
        _tile_2(a, a_stride, b, b_stride, c, c_stride, n, ahead, pace)
    else:
        _tile_1(a, a_stride, b, b_stride, c, c_stride, n, ahead, pace)


@kernel()
def address(array: Elements, row: int, column: int) -> int:
    """Address of an element of a contiguous float32[rows, columns]."""
    return int(array.ctypes.data + 4 * (row * array.shape[1] + column))
