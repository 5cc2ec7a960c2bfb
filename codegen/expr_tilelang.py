"""The step language in TileLang's Ascend dialect: functions of ours are external calls, which the
printed AscendC finds in tw_ascend_math.h.
"""

from __future__ import annotations

import math
import struct

from tilewright.codegen.elementary_steps import Definition, Literal

TILELANG_OPERATIONS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "tw_mul({0}, {1})",
    "div": "({0} / {1})",
    "fma": 'T.call_extern("float32", "__builtin_fmaf", {0}, {1}, {2})',
    "neg": "(-{0})",
    "abs": 'T.call_extern("float32", "__builtin_fabsf", {0})',
    "sqrt": 'T.call_extern("float32", "__builtin_sqrtf", {0})',
    "select_lt": "T.if_then_else({0} < {1}, {2}, {3})",
}


def tilelang_header() -> str:
    return (
        "def tw_mul(a, b):\n"
        '    return T.call_extern("float32", "tw_mul", a, b)\n'
    )  # fmt: skip


def tilelang_literal(literal: Literal) -> str:
    """Write a constant exactly."""
    if literal.kind == "i32":
        return str(literal.bits - (1 << 32) if literal.bits >> 31 else literal.bits)
    value: float = struct.unpack("<f", struct.pack("<I", literal.bits))[0]
    if math.isinf(value) or math.isnan(value):
        return f'T.float32(float("{value}"))'
    return f'T.float32(float.fromhex("{value.hex()}"))'


def tilelang_function(definition: Definition, values: list[str], result: str) -> str:
    """Write one function as an external call."""
    names = ", ".join(name for name, _ in definition.params)
    kind = {"f32": "float32", "i32": "int32", "u16": "uint16"}[definition.returns]
    call = f'T.call_extern("{kind}", "tw_{definition.name}", {names})'
    return f"\n\ndef tw_{definition.name}({names}):\n    return {call}\n"
