"""The Triton spelling of the step language.

Needs `enable_fp_fusion` off, so that a product and a sum stay two roundings; fused ones are spelled
out. Division and square root are the correctly rounded ones.
"""

from __future__ import annotations

import math
import struct

from tilewright.codegen.elementary_steps import Definition, Literal

TRITON_OPERATIONS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "tl.math.div_rn({0}, {1})",
    "fma": "tl.math.fma({0}, {1}, {2})",
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "sqrt": "tl.math.sqrt_rn({0})",
    "select_lt": "tl.where({0} < {1}, {2}, {3})",
    "select_eq": "tl.where({0} == {1}, {2}, {3})",
    "iadd": "({0} + {1})",
    "isub": "({0} - {1})",
    "iand": "({0} & {1})",
    "ior": "({0} | {1})",
    "ixor": "({0} ^ {1})",
    "ishl": "({0} << {1})",
    "ishr": "({0} >> {1})",
    "ushr": "({0}.to(tl.uint32, bitcast=True) >> {1}).to(tl.int32, bitcast=True)",
    "select_ilt": "tl.where({0} < {1}, {2}, {3})",
    "bits": "{0}.to(tl.int32, bitcast=True)",
    "from_bits": "{0}.to(tl.float32, bitcast=True)",
    "to_int": "{0}.to(tl.int32)",
    "to_float": "{0}.to(tl.float32)",
}
# The conversion instructions round to nearest even and keep subnormals, as our definitions do;
# only the payload of a NaN differs.
_NATIVE = {
    "round_bf16": "x.to(tl.bfloat16).to(tl.float32)",
    "round_f16": "x.to(tl.float16).to(tl.float32)",
}
_SMALLEST_NORMAL = 2.0**-126


def triton_header() -> str:
    return '"""Our own elementary functions."""\nimport triton\nimport triton.language as tl\n'


def triton_literal(literal: Literal) -> str:
    """Write a constant exactly; Triton takes a Python float for fp32 unless it is subnormal."""
    if literal.kind == "i32":
        return str(literal.bits - (1 << 32) if literal.bits >> 31 else literal.bits)
    value: float = struct.unpack("<f", struct.pack("<I", literal.bits))[0]
    if math.isinf(value) or math.isnan(value):
        return f"float('{value}')"
    if value != 0.0 and abs(value) < _SMALLEST_NORMAL:
        signed = literal.bits - (1 << 32) if literal.bits >> 31 else literal.bits
        return f"tl.full([], {signed}, tl.int32).to(tl.float32, bitcast=True)"
    return f"({value!r})" if value < 0 else repr(value)


def triton_function(definition: Definition, values: list[str], result: str) -> str:
    """Write one function, a line per step."""
    params = ", ".join(_entry(name, storage) for name, storage in definition.params)
    lines = [f"\n\n@triton.jit\ndef tw_{definition.name}({params}):"]
    if definition.name in _NATIVE:
        return "\n".join([*lines, f"    return {_NATIVE[definition.name]}"]) + "\n"
    for name, storage in definition.params:
        if storage == "u16":
            lines.append(f"    {name} = {_entry(name, storage)}.to(tl.int32)")
    for step, value in zip(definition.steps, values, strict=True):
        lines.append(f"    {step.target} = {value}")
    narrow = ".to(tl.uint16)" if definition.returns == "u16" else ""
    return "\n".join([*lines, f"    return {result}{narrow}"]) + "\n"


def _entry(name: str, storage: str) -> str:
    """Name a parameter as it enters: 16-bit ones are widened first."""
    return f"{name}_bits" if storage == "u16" else name
