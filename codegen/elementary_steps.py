"""A straight-line language over fp32 and i32 in which our own functions are defined once.

Every operation is exactly rounded or an integer operation, so a definition printed into any
language gives the same bits, apart from the sign and payload of a NaN.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal as OneOf
from typing import TypeAlias

Kind: TypeAlias = OneOf["f32", "i32"]
Storage: TypeAlias = OneOf["f32", "i32", "u16"]

_F: Kind = "f32"
_I: Kind = "i32"
# Operation -> kinds of its operands, kind of its result. `select_x(a, b, c, d)` is c where a x b
# holds, else d. Integers wrap; `ishr` keeps the sign and `ushr` shifts in zeros. `to_int` truncates
# and is defined below 2^31 in magnitude only; `to_float` rounds to nearest even.
OPS: dict[str, tuple[tuple[Kind, ...], Kind]] = {
    "add": ((_F, _F), _F),
    "sub": ((_F, _F), _F),
    "mul": ((_F, _F), _F),
    "div": ((_F, _F), _F),
    "fma": ((_F, _F, _F), _F),
    "neg": ((_F,), _F),
    "abs": ((_F,), _F),
    "sqrt": ((_F,), _F),
    "select_lt": ((_F, _F, _F, _F), _F),
    "select_eq": ((_F, _F, _F, _F), _F),
    "iadd": ((_I, _I), _I),
    "isub": ((_I, _I), _I),
    "iand": ((_I, _I), _I),
    "ior": ((_I, _I), _I),
    "ixor": ((_I, _I), _I),
    "ishl": ((_I, _I), _I),
    "ishr": ((_I, _I), _I),
    "ushr": ((_I, _I), _I),
    "select_ilt": ((_I, _I, _I, _I), _I),
    "bits": ((_F,), _I),
    "from_bits": ((_I,), _F),
    "to_int": ((_F,), _I),
    "to_float": ((_I,), _F),
}


@dataclass(frozen=True)
class Literal:
    """A constant, held as its 32 bits so that NaN and -0 keep their identity."""

    kind: Kind
    bits: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.bits:08x}"


@dataclass(frozen=True)
class Name:
    """A parameter or the result of an earlier step."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text


Operand: TypeAlias = Literal | Name


@dataclass(frozen=True)
class Step:
    """One assignment: `target = op(args)`."""

    target: Name
    op: str
    args: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{self.target} = {self.op}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class Definition:
    """A function as steps; `u16` parameters enter zero-extended, `u16` results are low halves."""

    name: str
    params: tuple[tuple[str, Storage], ...]
    returns: Storage
    steps: tuple[Step, ...]
    result: Operand

    def __str__(self) -> str:
        params = ", ".join(f"{name}: {storage}" for name, storage in self.params)
        lines = [f"{self.name}({params}) -> {self.returns}", *map(str, self.steps)]
        return "\n  ".join([*lines, f"return {self.result}"])


def f32_bits(value: float) -> int:
    """Return the bits of `value` rounded to fp32; OverflowError if it is finite but too large."""
    if math.isnan(value):
        return 0x7FC00000
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


@dataclass
class Recorder:
    """Called as `op("fma", a, b, 0.5)`: checks kinds, appends a step and returns its result."""

    steps: list[Step] = field(default_factory=list)

    def __call__(self, op: str, *args: Operand | float) -> Name:
        kinds, result = OPS[op]
        operands = tuple(_operand(a) for a in args)
        got = tuple(a.kind for a in operands)
        assert got == kinds, (op, got, kinds)
        target = Name(result, f"t{len(self.steps)}")
        self.steps.append(Step(target, op, operands))
        return target


def _operand(value: Operand | float) -> Operand:
    """Turn an int into an i32 literal and a float that fp32 holds into an fp32 one."""
    if isinstance(value, (Literal, Name)):
        return value
    if isinstance(value, int):
        return Literal("i32", value & 0xFFFFFFFF)
    bits = f32_bits(value)
    kept: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    assert kept == value or math.isnan(value), f"{value.hex()} is no fp32 value"
    return Literal("f32", bits)


def define(
    name: str,
    params: tuple[tuple[str, Storage], ...],
    returns: Storage,
    body: Callable[..., Operand],
) -> Definition:
    """Record `body(op, *params)` as a definition."""
    op = Recorder()
    operands = [Name("f32" if kind == "f32" else "i32", text) for text, kind in params]
    result = body(op, *operands)
    return Definition(name, params, returns, tuple(op.steps), result)
