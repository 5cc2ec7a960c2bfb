"""Symbolic extents: JSON and text round trips, evaluation, junk refused by one error class."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from tilewright.graph.dims import (
    DimDecl,
    Role,
    ceil_div,
    evaluate,
    format_dim,
    from_json,
    normalise,
    parse_dim,
    product,
    roles_of,
    symbol,
    symbols_of,
    to_json,
    upper_bound,
)
from tilewright.graph.errors import ShapeError

NAMES = ("tokens", "requests", "blocks")


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pair = st.tuples(inner, inner)
    return st.one_of(
        pair.map(lambda p: p[0] + p[1]),
        pair.map(lambda p: p[0] * p[1]),
        pair.map(lambda p: normalise(sympy.Max(*p))),
        pair.map(lambda p: normalise(sympy.Min(*p))),
        st.tuples(inner, st.integers(1, 130)).map(lambda p: normalise(ceil_div(*p))),
    )


dims = st.recursive(
    st.one_of(st.integers(0, 5000), st.sampled_from([symbol(n) for n in NAMES])),
    _combined, max_leaves=5,
)
bindings = st.fixed_dictionaries({n: st.integers(0, 300) for n in NAMES})


@given(dims, bindings)
def test_json_round_trip(dim: Any, binding: dict[str, int]) -> None:
    tree = to_json(dim)
    back = from_json(json.loads(json.dumps(tree)))
    assert evaluate(back, binding) == evaluate(dim, binding)
    assert to_json(back) == tree


@given(dims)
def test_text_round_trip(dim: Any) -> None:
    assert parse_dim(format_dim(dim)) == from_json(to_json(dim))
    assert format_dim(parse_dim(format_dim(dim))) == format_dim(dim)


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_ceil_div_of_a_symbol_equals_that_of_ints(a: int, b: int) -> None:
    assert evaluate(ceil_div(symbol("a"), b), {"a": a}) == ceil_div(a, b) == (a + b - 1) // b


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4),
              st.sampled_from(["add", "mul", "ceildiv", "max", "tokens"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner)),
)


@given(junk)
def test_from_json_raises_only_shape_errors(tree: object) -> None:
    try:
        to_json(from_json(tree))
    except ShapeError as error:
        assert "\n" not in str(error) or "\n" in repr(tree)


@given(st.text(alphabet="addceiluvm(), 0123456789-tk\n", max_size=30))
def test_parse_dim_raises_only_shape_errors(text: str) -> None:
    try:
        format_dim(parse_dim(text))
    except ShapeError:
        pass


def test_deep_nesting_is_refused() -> None:
    tree: object = 1
    for _ in range(5000):
        tree = ["add", tree, "tokens"]
    with pytest.raises(ShapeError) as error:
        from_json(tree)
    assert str(error.value) == "dim: nested too deep: got over 64 levels, want fewer"
    with pytest.raises(ShapeError) as error:
        parse_dim("add(" * 5000 + "1" + ")" * 5000)
    assert str(error.value) == "dim: too long: got 15001 tokens, want at most 512"


@given(st.sampled_from(NAMES), st.sampled_from(Role), st.integers(0, 9), st.integers(9, 99))
def test_a_declaration_compares_by_value(name: str, role: Role, lower: int, upper: int) -> None:
    decl = DimDecl(name, role, lower, upper)
    assert decl == DimDecl(name, Role(role.value), lower, upper)
    assert decl.symbol == symbol(name) == from_json(to_json(decl.symbol))
    assert upper_bound(decl.symbol * 2 + 1, {name: decl}) == 2 * upper + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DimDecl("a b", Role.BATCH),
         "dim 'a b': not an identifier: want letters, digits and _"),
        (lambda: DimDecl("t", Role.BATCH, 5, 4),
         "dim 't': bounds out of order: got 5..4, want 0 <= lower <= upper"),
        (lambda: normalise(True), "dim 'True': not an extent: got bool, want an int or a symbol"),
        (lambda: evaluate(symbol("t"), {"b": 1, "a": 1}), "dim 't': not bound: have a, b"),
        (lambda: evaluate(symbol("t") + 1, {"a": 1}), "dim 't': not bound: have a"),
        (lambda: ceil_div(symbol("t"), 0),
         "ceil_div of 't': divisor is not positive: got 0, want at least 1"),
        (lambda: roles_of(symbol("t"), {}), "dim 't': not declared: have none"),
        (lambda: from_json(["pow", 1, 2]),
         "dim '['pow', 1, 2]': unknown form: got list, want int, name, add, mul, max, min or "
         "ceildiv by a positive int"),
        (lambda: to_json(symbol("t") / 2),
         "dim '1/2': has no JSON form: got Half, want int, name, add, mul, max, min or ceildiv by "
         "a positive int"),
    ],
)
def test_messages(make: Any, message: str) -> None:
    with pytest.raises(ShapeError) as error:
        make()
    assert str(error.value) == message


def test_symbols_products_and_roles() -> None:
    t, r = symbol("t"), symbol("r")
    table = {"t": DimDecl("t", Role.BATCH), "r": DimDecl("r", Role.CONTEXT)}
    assert product([]) == 1
    assert product([t, 3, r]) == 3 * t * r
    assert symbols_of([t * 2, 7, r + t]) == {"t", "r"}
    assert roles_of(t + r, table) == {Role.BATCH, Role.CONTEXT}
    assert roles_of(8, table) == frozenset()
