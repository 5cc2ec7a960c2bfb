"""The C++ spelling of the step language.

Needs `-ffp-contract=off`, and products behind a barrier: g++ 12 forms `vfmaddsub` of a product and
sums of alternating sign in spite of that flag. `-fno-math-errno` and `-fno-trapping-math` change no
bits; without the second, g++ 12 keeps branches where it could select, and loops over our functions
stay scalar.
"""

from __future__ import annotations

import math
import struct

from tilewright.codegen.elementary_steps import Definition, Literal

# Unsigned where signed overflow would be undefined; >> of a negative value keeps its sign in g++
# and clang, as C++20 demands.
CPP_OPERATIONS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "tw_mul({0}, {1})",
    "div": "({0} / {1})",
    "fma": "__builtin_fmaf({0}, {1}, {2})",
    "neg": "(-{0})",
    "abs": "__builtin_fabsf({0})",
    "sqrt": "__builtin_sqrtf({0})",
    "select_lt": "({0} < {1} ? {2} : {3})",
    "select_eq": "({0} == {1} ? {2} : {3})",
    "iadd": "(int32_t)((uint32_t){0} + (uint32_t){1})",
    "isub": "(int32_t)((uint32_t){0} - (uint32_t){1})",
    "iand": "({0} & {1})",
    "ior": "({0} | {1})",
    "ixor": "({0} ^ {1})",
    "ishl": "(int32_t)((uint32_t){0} << {1})",
    "ishr": "({0} >> {1})",
    "ushr": "(int32_t)((uint32_t){0} >> {1})",
    "select_ilt": "({0} < {1} ? {2} : {3})",
    "bits": "tw_bits({0})",
    "from_bits": "tw_from_bits({0})",
    "to_int": "(int32_t)({0})",
    "to_float": "(float)({0})",
}

_TYPES = {"f32": "float", "i32": "int32_t", "u16": "uint16_t"}
# Left to its own limits g++ stops inlining long bodies, and a loop with a call is not vectorised.
CPP_INLINE = "static inline __attribute__((always_inline, unused))"


def cpp_header() -> str:
    """Return the includes, the product, and the two conversions between bits and values."""
    return f"""#include <cstdint>

{CPP_INLINE} float tw_mul(float a, float b) {{
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(a * b);
#endif
#endif
  return a * b;
}}

{CPP_INLINE} int32_t tw_bits(float x) {{
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}}

{CPP_INLINE} float tw_from_bits(int32_t bits) {{
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}}
"""


def cpp_literal(literal: Literal) -> str:
    """Write a constant exactly: hexadecimal floats, and integers as their signed value."""
    if literal.kind == "i32":
        signed = literal.bits - (1 << 32) if literal.bits >> 31 else literal.bits
        # -2^31 has no literal of its own: the minus sign would apply to a long.
        return f"({signed + 1} - 1)" if signed < 0 else str(signed)
    value: float = struct.unpack("<f", struct.pack("<I", literal.bits))[0]
    if math.isnan(value):
        return '__builtin_nanf("")'
    sign = "-" if literal.bits >> 31 else ""
    text = "__builtin_inff()" if math.isinf(value) else _trimmed(abs(value).hex()) + "f"
    return f"({sign}{text})" if sign else text


def _trimmed(text: str) -> str:
    """Drop trailing zeros of a hexadecimal mantissa."""
    mantissa, exponent = text.split("p")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}p{exponent}"


def cpp_function(definition: Definition, values: list[str], result: str) -> str:
    """Write one function, a line per step."""
    params = ", ".join(f"{_TYPES[s]} {_entry(n, s)}" for n, s in definition.params)
    lines = [f"\n{CPP_INLINE} {_TYPES[definition.returns]} tw_{definition.name}({params}) {{"]
    lines += [f"  const int32_t {n} = {_entry(n, s)};" for n, s in definition.params if s == "u16"]
    for step, value in zip(definition.steps, values, strict=True):
        lines.append(f"  const {_TYPES[step.target.kind]} {step.target} = {value};")
    narrow = f"({_TYPES[definition.returns]})" if definition.returns == "u16" else ""
    return "\n".join([*lines, f"  return {narrow}{result};", "}"]) + "\n"


def _entry(name: str, storage: str) -> str:
    """Name a parameter as it enters: 16-bit ones are widened first."""
    return f"{name}_bits" if storage == "u16" else name
