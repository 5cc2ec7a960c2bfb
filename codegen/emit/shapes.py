"""Extents of operands within one row, for emitters of every language."""

from __future__ import annotations

from tilewright.graph.dims import Dim, evaluate, symbols_of
from tilewright.graph.errors import LowerError
from tilewright.graph.types import TensorType


def constant(extent: Dim) -> int:
    """Return an extent that must be known when the kernel is generated."""
    if symbols_of([extent]):
        raise LowerError(f"extent '{extent}': is symbolic: want a constant inside a row")
    return evaluate(extent, {})


def inner_shape(type_: TensorType, rank: int, rows: Dim) -> tuple[int, ...]:
    """Return the shape of an operand within one row, for a result of `rank` axes."""
    shape = type_.shape
    if len(shape) == rank and rank > 0 and (shape[0] == rows or shape[0] == 1):
        shape = shape[1:]
    return tuple(constant(d) for d in shape)


def has_rows(type_: TensorType, rank: int, rows: Dim) -> bool:
    """Say whether an operand has one entry per row."""
    return len(type_.shape) == rank and rank > 0 and type_.shape[0] == rows
