"""Scalar expressions: what an elementwise op computes for one element, as a small ordered tree.

The vocabulary is closed and order is kept as written: nothing here simplifies, because reordering
floating-point operations changes bits. Printers per language live in the code generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tilewright.graph.errors import ShapeError

# Exactly rounded by IEEE 754, so equal on every target.
EXACT = ("add", "sub", "mul", "div", "neg", "abs", "sqrt", "fma", "min", "max", "select_lt")
# Defined by our own polynomials in the code generator.
FUNCTIONS = ("exp", "log", "log1p", "tanh", "erf", "sin", "cos", "sigmoid")
# Rounding to a storage type and back: only `cast` nodes may produce these.
ROUNDINGS = ("round_bf16", "round_f16", "round_f32", "round_i32")
ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "min": 2, "max": 2, "select_lt": 4}


@dataclass(frozen=True)
class Const:
    """An fp32 literal."""

    value: float


@dataclass(frozen=True)
class Var:
    """An operand of the op, by position or by name."""

    name: str


@dataclass(frozen=True)
class Call:
    """A primitive applied to expressions, evaluated left to right."""

    fn: str
    args: tuple[Scalar, ...]

    def __post_init__(self) -> None:
        if self.fn not in EXACT + FUNCTIONS + ROUNDINGS:
            known = ", ".join(EXACT + FUNCTIONS + ROUNDINGS)
            raise ShapeError(f"scalar function '{self.fn}': unknown: have {known}")
        want = ARITY.get(self.fn, 1)
        if len(self.args) != want:
            raise ShapeError(
                f"scalar function '{self.fn}': wrong arity: got {len(self.args)}, want {want}"
            )


Scalar: TypeAlias = Const | Var | Call


def lift(value: Scalar | float) -> Scalar:
    """Return `value` as an expression; a number becomes an fp32 literal."""
    return Const(float(value)) if isinstance(value, (int, float)) else value


def call(fn: str, *args: Scalar | float) -> Call:
    """Apply a primitive: `call("fma", a, b, c)` is a * b + c with one rounding."""
    return Call(fn, tuple(lift(a) for a in args))


def add(a: Scalar | float, b: Scalar | float) -> Call:
    return call("add", a, b)


def sub(a: Scalar | float, b: Scalar | float) -> Call:
    return call("sub", a, b)


def mul(a: Scalar | float, b: Scalar | float) -> Call:
    return call("mul", a, b)


def div(a: Scalar | float, b: Scalar | float) -> Call:
    return call("div", a, b)


def substitute(expr: Scalar, values: dict[str, Scalar]) -> Scalar:
    """Return `expr` with its variables replaced."""
    match expr:
        case Var(name):
            return values[name]
        case Call(fn, args):
            return Call(fn, tuple(substitute(a, values) for a in args))
        case _:
            return expr


def variables(expr: Scalar) -> frozenset[str]:
    """Return the names of the variables in `expr`."""
    match expr:
        case Var(name):
            return frozenset([name])
        case Call(_, args):
            return frozenset().union(*(variables(a) for a in args))
        case _:
            return frozenset()


def evaluate(expr: Scalar, values: dict[str, float]) -> float:
    """Evaluate in Python floats (fp64): the meaning of the tree, for tests of small cases."""
    match expr:
        case Const(value):
            return value
        case Var(name):
            return values[name]
        case Call(fn, args):
            return _apply(fn, [evaluate(a, values) for a in args])


def _apply(fn: str, x: Sequence[float]) -> float:
    table = {
        "add": lambda: x[0] + x[1],
        "sub": lambda: x[0] - x[1],
        "mul": lambda: x[0] * x[1],
        "div": lambda: x[0] / x[1],
        "neg": lambda: -x[0],
        "abs": lambda: abs(x[0]),
        "sqrt": lambda: math.sqrt(x[0]),
        "fma": lambda: x[0] * x[1] + x[2],
        "min": lambda: min(x[0], x[1]),
        "max": lambda: max(x[0], x[1]),
        "select_lt": lambda: x[2] if x[0] < x[1] else x[3],
        "exp": lambda: math.exp(x[0]),
        "log": lambda: math.log(x[0]),
        "log1p": lambda: math.log1p(x[0]),
        "tanh": lambda: math.tanh(x[0]),
        "erf": lambda: math.erf(x[0]),
        "sin": lambda: math.sin(x[0]),
        "cos": lambda: math.cos(x[0]),
        "sigmoid": lambda: 1.0 / (1.0 + math.exp(-x[0])),
    }
    if fn not in table:
        return x[0]  # roundings are the identity in the ideal evaluation
    return table[fn]()
