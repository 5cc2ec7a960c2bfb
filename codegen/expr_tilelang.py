"""The step language in TileLang: functions of ours are external calls, which printed AscendC finds
in tw_ascend_math.h and printed CUDA in tw_math.cuh.
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


def _call(name: str, count: int) -> str:
    operands = ", ".join(f"{{{i}}}" for i in range(count))
    return f'T.call_extern("float32", "{name}", {operands})'


# Calls keep the compiler from simplifying what it takes for numbers without rounding.
TILELANG_CUDA_OPERATIONS = {
    "add": _call("__fadd_rn", 2),
    "sub": _call("__fsub_rn", 2),
    "mul": _call("__fmul_rn", 2),
    "div": _call("__fdiv_rn", 2),
    "fma": _call("__fmaf_rn", 3),
    "neg": "(-{0})",
    "abs": _call("fabsf", 1),
    "sqrt": _call("__fsqrt_rn", 1),
    "select_lt": "T.if_then_else({0} < {1}, {2}, {3})",
}


def tilelang_cuda_header() -> str:
    return (
        '"""Functions of ours, which the printed CUDA defines."""\n'
        "import tilelang.cuda.language as T\n"
    )


def tilelang_cuda_function(definition: Definition, values: list[str], result: str) -> str:
    """Write one function as an external call; a rounding to bf16 as the chip's own."""
    if definition.name == "round_bf16":
        return (
            "\n\ndef tw_round_bf16(x):\n"
            '    return T.cast(T.cast(x, "bfloat16"), "float32")\n'
        )
    return tilelang_function(definition, values, result)


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
