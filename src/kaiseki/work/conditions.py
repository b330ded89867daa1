"""The `when` expressions of a classes file: comparisons over columns, evaluated on whole batches.

The grammar is numbers, the names in `COLUMNS`, `+ - *`, comparisons (chained ones, too), `and`, `or`, `not`
and parentheses. Python's parser reads it; nothing but these nodes is let through, and nothing is executed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kaiseki.work.batches import F64, NONE, Batch, Bool

COLUMNS: dict[str, Callable[[Batch], Any]] = {
    "input_tokens": lambda batch: batch.prompt_tokens,
    "output_tokens": lambda batch: batch.output_tokens,
    "total_tokens": lambda batch: batch.prompt_tokens.astype(np.int64) + batch.output_tokens,
    "arrival_s": lambda batch: batch.arrival_ns * 1e-9,
    "follow_up": lambda batch: batch.follow.parent != NONE,
}
"""What may be asked about a request; `follow_up` is 1 for one that waits for another of its session."""

MAX_CHARACTERS = 1000
_ARITHMETIC: dict[type[ast.operator], Callable[[F64, F64], F64]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[F64, F64], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on requests.

    Attributes:
        text: as it was written.
        tree: the checked expression.
    """

    text: str
    tree: ast.expr

    def holds(self, batch: Batch) -> Bool:
        """bool[n]: for which requests of a batch it is true."""
        return _truth(self.tree, batch)


def parse(text: str) -> Condition:
    """Read an expression.

    Raises:
        ValueError: with what is wrong and what is allowed.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"at most {MAX_CHARACTERS} characters are allowed")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _check_truth(tree)
    except SyntaxError as error:
        raise ValueError(f"not an expression: {error.msg}; {_example()}") from None
    except (RecursionError, MemoryError):
        raise ValueError("nested too deeply") from None
    return Condition(text, tree)


def _example() -> str:
    return f"allowed are comparisons such as 'input_tokens <= 2000' of {', '.join(COLUMNS)}"


def _check_truth(node: ast.expr) -> None:
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _check_truth(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _check_truth(operand)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            type(op) in _COMPARISONS for op in ops
        ):
            for value in (left, *others):
                _check_number(value)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is no condition; {_example()}, 'and', 'or', 'not'")


def _check_number(node: ast.expr) -> None:
    match node:
        case ast.Name(id=name) if name in COLUMNS:
            pass
        case ast.Name(id=name):
            raise ValueError(f"{name!r} is unknown; allowed: {', '.join(COLUMNS)}")
        case ast.Constant(value=int() | float() as value) if type(value) is not bool and _finite(value):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check_number(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            _check_number(left)
            _check_number(right)
        case _:
            raise ValueError(f"{ast.unparse(node)[:80]!r} is no number; allowed: numbers, names, + - *")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _truth(node: ast.expr, batch: Batch) -> Bool:
    match node:
        case ast.BoolOp(op=op, values=values):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return np.asarray(join.reduce([_truth(value, batch) for value in values]))
        case ast.UnaryOp(operand=operand):
            return ~_truth(operand, batch)
        case ast.Compare(left=left, ops=ops, comparators=others):
            numbers = [_number(value, batch) for value in (left, *others)]
            pairs = zip(ops, numbers[:-1], numbers[1:], strict=True)
            return np.asarray(np.logical_and.reduce([_COMPARISONS[type(op)](a, b) for op, a, b in pairs]))
    raise AssertionError(f"checked before: {ast.dump(node)}")


def _number(node: ast.expr, batch: Batch) -> F64:
    match node:
        case ast.Name(id=name):
            return np.asarray(COLUMNS[name](batch), np.float64)
        case ast.Constant(value=int() | float() as value):
            return np.full(len(batch), float(value))
        case ast.UnaryOp(operand=operand):
            return -_number(operand, batch)
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(left, batch), _number(right, batch))
    raise AssertionError(f"checked before: {ast.dump(node)}")
