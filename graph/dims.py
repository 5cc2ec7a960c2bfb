"""Symbolic extents. A dim is an int or a sympy expression of named symbols; what may change a
symbol between two calls (its role) stands in a table beside it, never in the symbol itself.

The only file of this folder that imports sympy. Floating-point expressions never go through sympy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeAlias

import sympy

from tilewright.graph.errors import ShapeError

Dim: TypeAlias = Any  # int | sympy.Expr; sympy carries no types that mypy could check
DimJson: TypeAlias = "int | str | list[Any]"


class Role(Enum):
    """What may change an extent between two calls of the same kernel."""

    BATCH = "batch"  # the other requests of the step
    CONTEXT = "context"  # this request alone


@dataclass(frozen=True)
class DimDecl:
    """A named extent: its role and its inclusive bounds, in elements."""

    name: str
    role: Role
    lower: int = 1
    upper: int = 1 << 31

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ShapeError(f"dim '{self.name}': not an identifier: want letters, digits and _")
        if not 0 <= self.lower <= self.upper:
            raise ShapeError(
                f"dim '{self.name}': bounds out of order: got {self.lower}..{self.upper}, "
                "want 0 <= lower <= upper"
            )

    @property
    def symbol(self) -> Dim:
        return symbol(self.name)


def symbol(name: str) -> Dim:
    """Return the symbol of a named extent; equal names give equal symbols."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


def ceil_div(a: Dim, b: int) -> Dim:
    """Return ceil(a / b) for a positive int `b`, exact on ints."""
    if b <= 0:
        raise ShapeError(f"ceil_div of '{a}': divisor is not positive: got {b}, want at least 1")
    if isinstance(a, int):
        return -(-a // b)
    return sympy.ceiling(sympy.sympify(a) / b)


def smaller(a: Dim, b: Dim) -> Dim:
    """Return the smaller of two extents."""
    return normalise(sympy.Min(a, b))


def normalise(dim: Dim) -> Dim:
    """Return an int for constant extents, else the sympy expression."""
    if isinstance(dim, bool):
        raise ShapeError(f"dim '{dim}': not an extent: got bool, want an int or a symbol")
    if isinstance(dim, int):
        return dim
    expr = sympy.sympify(dim)
    return int(expr) if expr.is_Integer else expr


def symbols_of(dims: Iterable[Dim]) -> frozenset[str]:
    """Return the names of all symbols in `dims`."""
    return frozenset(
        s.name for dim in dims if not isinstance(dim, int) for s in sympy.sympify(dim).free_symbols
    )


def evaluate(dim: Dim, binding: Mapping[str, int]) -> int:
    """Return the extent with every symbol bound; raise ShapeError for one that is not."""
    if isinstance(dim, int):
        return dim
    if isinstance(dim, sympy.Symbol):
        if dim.name in binding:
            return binding[dim.name]
        raise ShapeError(f"dim '{dim.name}': not bound: have {_listed(binding)}")
    names = symbols_of([dim])
    if missing := names - binding.keys():
        raise ShapeError(f"dim '{min(missing)}': not bound: have {_listed(binding)}")
    return _evaluate(_tree(dim), binding)


@cache
def _tree(dim: Dim) -> DimJson:
    """The form that is bound by arithmetic of Python: sympy takes a thousand times as long."""
    return to_json(dim)


def _evaluate(tree: DimJson, binding: Mapping[str, int]) -> int:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return binding[tree]
    head, *rest = tree
    values = [_evaluate(a, binding) for a in rest]
    match head:
        case "ceildiv":
            return -(-values[0] // values[1])
        case "add":
            return sum(values)
        case "mul":
            return math.prod(values)
    return max(values) if head == "max" else min(values)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def upper_bound(dim: Dim, dims: Mapping[str, DimDecl]) -> int:
    """Return the extent at every symbol's upper bound (our extents grow with their symbols)."""
    return evaluate(dim, {name: decl.upper for name, decl in dims.items()})


def roles_of(dim: Dim, dims: Mapping[str, DimDecl]) -> frozenset[Role]:
    """Return the roles of the symbols in `dim`; raise ShapeError for an undeclared one."""
    roles = set()
    for name in symbols_of([dim]):
        if name not in dims:
            raise ShapeError(f"dim '{name}': not declared: have {_listed(dims)}")
        roles.add(dims[name].role)
    return frozenset(roles)


def to_json(dim: Dim) -> DimJson:
    """Return the JSON tree of a dim, such as ["ceildiv", "tokens", 128]."""
    if isinstance(dim, int):
        return dim
    expr = sympy.sympify(dim)
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return str(expr.name)
    if isinstance(expr, sympy.ceiling):
        numerator, denominator = sympy.fraction(sympy.together(expr.args[0]))
        return ["ceildiv", to_json(numerator), to_json(denominator)]
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return ["mul", *[to_json(expr.base)] * int(expr.exp)]
    for kind, head in _HEADS.items():
        if isinstance(expr, kind):
            args = sorted(expr.args, key=sympy.default_sort_key)
            return [head, *(to_json(a) for a in args)]
    raise ShapeError(f"dim '{expr}': has no JSON form: got {expr.func.__name__}, want {_KNOWN}")


_HEADS = {sympy.Add: "add", sympy.Mul: "mul", sympy.Max: "max", sympy.Min: "min"}
_BUILDERS = {head: kind for kind, head in _HEADS.items()}
_KNOWN = "int, name, add, mul, max, min or ceildiv by a positive int"
_MAX_DEPTH = 64
_MAX_TOKENS = 512


def from_json(tree: object) -> Dim:
    """Return the dim of a JSON tree; raise ShapeError for anything `to_json` does not write."""
    return _from_json(tree, 0)


def _from_json(tree: object, depth: int) -> Dim:
    if depth > _MAX_DEPTH:
        raise ShapeError(f"dim: nested too deep: got over {_MAX_DEPTH} levels, want fewer")
    match tree:
        case bool():
            pass
        case int():
            return tree
        case str() if tree.isidentifier():
            return symbol(tree)
        case ["ceildiv", a, int(b)] if b > 0 and not isinstance(b, bool):
            return normalise(ceil_div(_from_json(a, depth + 1), b))
        case [str(head), *args] if head in _BUILDERS and args:
            return normalise(_BUILDERS[head](*(_from_json(a, depth + 1) for a in args)))
    raise ShapeError(f"dim '{tree}': unknown form: got {type(tree).__name__}, want {_KNOWN}")


def format_dim(dim: Dim) -> str:
    """Print a dim as text that `parse_dim` reads back, such as ceildiv(tokens, 128)."""
    return str(dim) if isinstance(dim, int) else _format(to_json(dim))


def _format(tree: DimJson) -> str:
    if not isinstance(tree, list):
        return str(tree)
    return f"{tree[0]}({', '.join(_format(a) for a in tree[1:])})"


_DIM_TOKEN = re.compile(r"\s*(?:(-?[0-9]{1,19})|(\w+)|([(),]))")


def parse_dim(text: str) -> Dim:
    """Return the dim printed as `text`; raise ShapeError for malformed text."""
    tokens: list[str] = []
    end = 0
    while match := _DIM_TOKEN.match(text, end):
        tokens.append(match.group().strip())
        end = match.end()
    if len(tokens) > _MAX_TOKENS:
        raise ShapeError(f"dim: too long: got {len(tokens)} tokens, want at most {_MAX_TOKENS}")
    tree, rest = _parse_tree(text, tokens, 0)
    if text[end:].strip() or rest != len(tokens):
        raise ShapeError(f"dim '{text}': malformed: want {_KNOWN}")
    return from_json(tree)


def _parse_tree(text: str, tokens: list[str], at: int) -> tuple[DimJson, int]:
    """Return the tree that starts at token `at`, and the index after it."""
    if at >= len(tokens) or tokens[at] in "(),":
        raise ShapeError(f"dim '{text}': malformed: want {_KNOWN}")
    token, at = tokens[at], at + 1
    if token.isascii() and token.lstrip("-").isdecimal():
        return int(token), at
    if at >= len(tokens) or tokens[at] != "(":
        return token, at
    args: list[Any] = [token]
    while tokens[at] != ")":
        arg, at = _parse_tree(text, tokens, at + 1)
        args.append(arg)
        if at >= len(tokens) or tokens[at] not in ",)":
            raise ShapeError(f"dim '{text}': malformed: want {_KNOWN}")
    return args, at + 1


def product(dims: Iterable[Dim]) -> Dim:
    """Return the product of extents (1 for none)."""
    result: Dim = 1
    for dim in dims:
        result = result * dim
    return normalise(result)
