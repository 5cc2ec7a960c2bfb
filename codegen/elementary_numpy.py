"""Runs definitions of elementary functions in numpy: the living meaning of the step language."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.elementary_steps import Definition, Literal, Name, Operand
from tilewright.graph.errors import LowerError

Array = NDArray[np.generic]
_DTYPES = {"f32": np.float32, "i32": np.int32, "u16": np.uint16}


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c rounded once to fp32.

    The product is exact in fp64. The sum is rounded to odd there, which makes the second rounding
    harmless because fp64 has over two bits more than twice fp32 (Boldo and Melquiond, 2008).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = np.asarray(product + addend)
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    # One step in the direction of what was lost: away from zero when the signs agree.
    step = np.where((lost > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(total) & np.isfinite(lost) & (lost != 0) & even
    odd = np.where(inexact, bits + step, bits).view(np.float64)
    return odd.astype(np.float32)


def _shift_right(a: Array, n: Array) -> Array:
    return (a.view(np.uint32) >> n.view(np.uint32)).view(np.int32)


def _select_lt(a: Array, b: Array, c: Array, d: Array) -> Array:
    return np.where(np.less(a, b), c, d)


def _select_eq(a: Array, b: Array, c: Array, d: Array) -> Array:
    return np.where(np.equal(a, b), c, d)


def _to_int(a: Array) -> Array:
    """Truncate; out-of-range lanes are undefined in the language and 0 here."""
    safe = np.where(np.abs(a.astype(np.float64)) <= 2.0**31, a, np.float32(0)).astype(np.float64)
    return safe.astype(np.int64).astype(np.int32)


_RUN: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": fma,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "select_lt": _select_lt,
    "select_eq": _select_eq,
    "iadd": np.add,
    "isub": np.subtract,
    "iand": np.bitwise_and,
    "ior": np.bitwise_or,
    "ixor": np.bitwise_xor,
    "ishl": np.left_shift,
    "ishr": np.right_shift,
    "ushr": _shift_right,
    "select_ilt": _select_lt,
    "bits": lambda a: a.view(np.int32),
    "from_bits": lambda a: a.view(np.float32),
    "to_int": _to_int,
    "to_float": lambda a: a.astype(np.float32),
}


def apply(op: str, *args: Array) -> Array:
    """Apply one operation of the step language to arrays of one shape."""
    return _RUN[op](*args)


def run(definition: Definition, arrays: Sequence[Array]) -> Array:
    """Evaluate `definition` elementwise; LowerError if the operands do not fit its parameters."""
    want = [(name, np.dtype(_DTYPES[storage])) for name, storage in definition.params]
    got = ", ".join(str(a.dtype) for a in arrays)
    if [dtype for _, dtype in want] != [a.dtype for a in arrays]:
        need = ", ".join(str(dtype) for _, dtype in want)
        raise LowerError(
            f"function '{definition.name}': operands differ from its parameters:"
            f" got ({got}), want ({need})"
        )
    values: dict[str, Array] = {}
    for (name, dtype), array in zip(want, arrays, strict=True):
        values[name] = array.astype(np.int32) if dtype == np.uint16 else array
    shape = arrays[0].shape
    with np.errstate(all="ignore"):
        for step in definition.steps:
            operands = (_fetch(a, values, shape) for a in step.args)
            values[step.target.text] = np.ascontiguousarray(apply(step.op, *operands))
    result = _fetch(definition.result, values, shape)
    return result.astype(_DTYPES[definition.returns])


def _fetch(operand: Operand, values: dict[str, Array], shape: tuple[int, ...]) -> Array:
    """Return the operand as an array: literals fill the shape, so that views stay possible."""
    match operand:
        case Name(_, text):
            return values[text]
        case Literal(kind, bits):
            filled = np.full(shape, bits, np.uint32)
            return filled.view(_DTYPES[kind])
