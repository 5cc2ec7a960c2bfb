"""The CUDA spelling of the step language: that of C++ with intrinsics that are never contracted."""

from __future__ import annotations

from tilewright.codegen.elementary_steps import Definition
from tilewright.codegen.expr_cpp import CPP_INLINE, CPP_OPERATIONS, cpp_function

_INLINE = "static __device__ __forceinline__"
CUDA_OPERATIONS = {
    **CPP_OPERATIONS,
    "add": "__fadd_rn({0}, {1})",
    "sub": "__fsub_rn({0}, {1})",
    "mul": "__fmul_rn({0}, {1})",
    "div": "__fdiv_rn({0}, {1})",
    "fma": "__fmaf_rn({0}, {1}, {2})",
    "abs": "fabsf({0})",
    "sqrt": "__fsqrt_rn({0})",
    "bits": "__float_as_int({0})",
    "from_bits": "__int_as_float({0})",
    "to_int": "__float2int_rz({0})",
    "to_float": "__int2float_rn({0})",
}


def cuda_header() -> str:
    return "#pragma once\n#include <stdint.h>\n"


def cuda_function(definition: Definition, values: list[str], result: str) -> str:
    """Write one function, a line per step."""
    return cpp_function(definition, values, result).replace(CPP_INLINE, _INLINE)
