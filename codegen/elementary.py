"""Our own elementary functions: each is defined once and printed into every language.

`evaluate` runs a definition in numpy with exact fma: it is the meaning that generated code must
match bit for bit. `MATH_VERSION` changes whenever a definition does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen import elementary_functions as functions
from tilewright.codegen import elementary_rounding as rounding
from tilewright.codegen.elementary_numpy import run
from tilewright.codegen.elementary_steps import Definition, Operand, Storage, define
from tilewright.graph.errors import LowerError


def _real(name: str, body: Callable[..., Operand], *params: str) -> Definition:
    """Define a function from fp32 to fp32."""
    kinds: tuple[tuple[str, Storage], ...] = tuple((p, "f32") for p in params or ("x",))
    return define(name, kinds, "f32", body)


# The order is that of printing; the names of graph.scalar keep their meaning here.
DEFINITIONS: dict[str, Definition] = {
    d.name: d
    for d in (
        _real("exp", functions.exp),
        _real("log", functions.log),
        _real("log1p", functions.log1p),
        _real("tanh", functions.tanh),
        _real("erf", functions.erf),
        _real("sin", functions.sin),
        _real("cos", functions.cos),
        _real("sigmoid", functions.sigmoid),
        _real("min", rounding.minimum, "a", "b"),
        _real("max", rounding.maximum, "a", "b"),
        _real("round_bf16", rounding.round_bf16),
        _real("round_f16", rounding.round_f16),
        _real("round_f32", rounding.round_f32),
        _real("round_i32", rounding.round_i32),
        define("bf16_to_f32", (("x", "u16"),), "f32", rounding.bf16_value),
        define("f32_to_bf16", (("x", "f32"),), "u16", rounding.bf16_bits),
        define("f16_to_f32", (("x", "u16"),), "f32", rounding.f16_value),
        define("f32_to_f16", (("x", "f32"),), "u16", rounding.f16_bits),
        define("f32_to_i32", (("x", "f32"),), "i32", rounding.i32_value),
    )
}

MATH_VERSION = hashlib.sha256("\n".join(map(str, DEFINITIONS.values())).encode()).hexdigest()[:16]


def definition(name: str) -> Definition:
    """Return a definition; LowerError names the known ones."""
    if name not in DEFINITIONS:
        raise LowerError(f"function '{name}': unknown: have {', '.join(DEFINITIONS)}")
    return DEFINITIONS[name]


def evaluate(name: str, *arrays: NDArray[np.generic]) -> NDArray[np.generic]:
    """Evaluate a function elementwise, bit for bit as its definition says.

    Operands are float32 or, for the conversions from 16-bit formats, uint16 arrays of one shape;
    the result has their shape and the type the definition returns. LowerError for an unknown name,
    a wrong number of operands or a wrong dtype.
    """
    return run(definition(name), arrays)
