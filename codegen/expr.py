"""Prints scalar expressions and our elementary functions as source text, one table per language.

Operations keep the order of the tree and are fully parenthesised, so no printer can regroup them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen import elementary_numpy
from tilewright.codegen.elementary import DEFINITIONS, MATH_VERSION, evaluate
from tilewright.codegen.elementary_steps import Definition, Literal, Operand, f32_bits
from tilewright.codegen.expr_cpp import CPP_OPERATIONS, cpp_function, cpp_header, cpp_literal
from tilewright.codegen.expr_cuda import CUDA_OPERATIONS, cuda_function, cuda_header
from tilewright.codegen.expr_tilelang import (
    TILELANG_CUDA_OPERATIONS,
    TILELANG_OPERATIONS,
    tilelang_cuda_function,
    tilelang_cuda_header,
    tilelang_function,
    tilelang_header,
    tilelang_literal,
)
from tilewright.codegen.expr_triton import (
    TRITON_OPERATIONS,
    triton_function,
    triton_header,
    triton_literal,
)
from tilewright.graph.errors import LowerError
from tilewright.graph.scalar import Call, Const, Scalar, Var

__all__ = ["LANGUAGES", "MATH_VERSION", "Language", "evaluate_scalar", "prelude", "print_scalar"]


@dataclass(frozen=True)
class Language:
    """How one language writes the step language and a function of ours."""

    operations: Mapping[str, str]  # operation -> text with {0}, {1}, ... for the operands
    literal: Callable[[Literal], str]
    header: Callable[[], str]
    function: Callable[[Definition, list[str], str], str]  # assignments and result as text
    external: bool = False  # functions are declared only: another language defines them
    passed: str = "{0}"  # a constant as the argument of a function


LANGUAGES: dict[str, Language] = {
    "cpp": Language(CPP_OPERATIONS, cpp_literal, cpp_header, cpp_function),
    "cuda": Language(CUDA_OPERATIONS, cpp_literal, cuda_header, cuda_function),
    "triton": Language(
        TRITON_OPERATIONS, triton_literal, triton_header, triton_function,
        passed="tl.full([], {0}, tl.float32)",
    ),
    "tilelang": Language(
        TILELANG_CUDA_OPERATIONS, tilelang_literal, tilelang_cuda_header, tilelang_cuda_function,
        external=True,
    ),
    "tilelang_ascend": Language(
        TILELANG_OPERATIONS, tilelang_literal, tilelang_header, tilelang_function, external=True
    ),
}


def language_table(language: str) -> Language:
    """Return the table of a language; LowerError names the known ones."""
    if language not in LANGUAGES:
        raise LowerError(f"language '{language}': unknown: have {', '.join(LANGUAGES)}")
    return LANGUAGES[language]


def print_scalar(expr: Scalar, names: Mapping[str, str], language: str) -> str:
    """Print `expr` as one fp32 expression; `names` maps its variables to source text.

    Functions, roundings, min and max become calls of what `prelude` defines. LowerError for an
    unknown language, a variable without a name, or a literal too large for fp32.
    """
    return _print(expr, names, language_table(language))


def _print(expr: Scalar, names: Mapping[str, str], table: Language) -> str:
    match expr:
        case Const(value):
            return table.literal(_literal(value))
        case Var(name):
            return _variable(name, names)
        case Call(fn, args):
            texts = [_print(a, names, table) for a in args]
            if fn in DEFINITIONS:
                passed = [
                    table.passed.format(text) if isinstance(arg, Const) else text
                    for arg, text in zip(args, texts, strict=True)
                ]
                return f"tw_{fn}({', '.join(passed)})"
            return table.operations[fn].format(*texts)


def _literal(value: float) -> Literal:
    """Round a constant to fp32 as fp32 arithmetic would."""
    try:
        return Literal("f32", f32_bits(value))
    except OverflowError:
        raise LowerError(
            f"literal '{value!r}': too large for fp32: got {value!r}, want at most 3.4028235e+38"
        ) from None


def _variable(name: str, names: Mapping[str, str]) -> str:
    if name not in names:
        raise LowerError(f"variable '{name}': has no name in the source: have {', '.join(names)}")
    return names[name]


def prelude(language: str) -> str:
    """Return the source text that defines `tw_exp` and all other functions of ours."""
    table = language_table(language)
    return table.header() + "".join(_function(d, table) for d in DEFINITIONS.values())


def _function(definition: Definition, table: Language) -> str:
    """Print one definition, a line per step."""

    def text(operand: Operand) -> str:
        return table.literal(operand) if isinstance(operand, Literal) else operand.text

    if table.external:
        return table.function(definition, [], "")
    values = [table.operations[s.op].format(*map(text, s.args)) for s in definition.steps]
    return table.function(definition, values, text(definition.result))


def evaluate_scalar(
    expr: Scalar, values: Mapping[str, NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Evaluate `expr` elementwise with the bits that printed code gives.

    `values` holds float32 arrays of one shape; the result has that shape.
    """
    shape = np.broadcast_shapes(*(v.shape for v in values.values()))
    return _evaluate(expr, values, shape).astype(np.float32)


def _evaluate(
    expr: Scalar, values: Mapping[str, NDArray[np.float32]], shape: tuple[int, ...]
) -> NDArray[np.generic]:
    match expr:
        case Const(value):
            return np.full(shape, _literal(value).bits, np.uint32).view(np.float32)
        case Var(name):
            return np.ascontiguousarray(np.broadcast_to(values[name], shape))
        case Call(fn, args):
            arrays = [_evaluate(a, values, shape) for a in args]
            if fn in DEFINITIONS:
                return evaluate(fn, *arrays)
            with np.errstate(all="ignore"):
                return elementary_numpy.apply(fn, *arrays)
