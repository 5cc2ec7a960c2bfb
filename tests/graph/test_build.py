"""The builder: unique scoped names, origins, operators, errors at the model's source line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest

from tilewright.graph import GraphBuilder, Role, Value
from tilewright.graph.errors import ShapeError
from tilewright.graph.types import BF16, F32, I32
from tilewright.graph.verify import verify


def started() -> tuple[GraphBuilder, Value]:
    b = GraphBuilder("g")
    return b, b.input("x", F32, b.dim("t", Role.BATCH, upper=8), 4)


def test_names_are_unique_within_scopes() -> None:
    b, x = started()
    with b.scope("layers.0"):
        first, second = b.op("neg", x), b.op("neg", x)
    third = b.op("neg", x, name="x")
    assert [v.name for v in (first, second, third)] == ["layers.0.neg", "layers.0.neg_1", "x_1"]


def test_a_scope_ends_even_after_an_error() -> None:
    b, x = started()
    with pytest.raises(ShapeError), b.scope("inner"):
        b.op("softmax", x, wrong=1)
    assert b.op("neg", x).name == "neg"


def test_origin_is_the_line_that_made_the_node() -> None:
    b, x = started()
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    y = b.cast(x * 2.0, BF16)
    b.output("y", y)
    assert {n.origin for n in b.build().nodes} == {f"graph/test_build.py:{line}"}


def test_operators_are_nodes() -> None:
    b, x = started()
    y = (x + x) * x - x / x
    b.output("y", -(y * 0.5 + 1.0))
    graph = b.build()
    assert [n.op for n in graph.nodes] == ["add", "mul", "div", "sub", "scale", "shift", "neg"]
    verify(graph)


def test_one_weight_a_name_and_no_cast_to_the_same_type() -> None:
    b, x = started()
    assert b.weight("w", F32, 4) == b.weight("w", F32, 4)
    assert b.cast(x, F32) is x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b, x: b.linear(x, b.weight("w", F32, 4, 5), name="q"),
         "linear 'q': inner extents differ: got f32[4, 5], want [n, 4] (LINE)"),
        (lambda b, x: b.op("add", x, b.weight("w", F32, 3)),
         "add 'add': shapes do not broadcast: got [3], want a shape that fits [t, 4] (LINE)"),
        (lambda b, x: b.op("swish", x), None),
        (lambda b, x: b.input("x", F32, 4), "value 'x': declared twice (LINE)"),
        (lambda b, x: (b.weight("w", F32, 4), b.weight("w", BF16, 4)),
         "weight 'w': declared twice: got bf16[4], want f32[4] (LINE)"),
        (lambda b, x: b.append(x, x, x),
         "append 'append': stores into a value that is not the newest of a state: got 'x', want "
         "one of none (LINE)"),
        (lambda b, x: b.dim("t", Role.CONTEXT), "dim 't': declared twice: got DimDecl(name='t', "
         "role=<Role.CONTEXT: 'context'>, lower=1, upper=2147483648), want DimDecl(name='t', "
         "role=<Role.BATCH: 'batch'>, lower=1, upper=8)"),
    ],
)
def test_messages(make: Callable[[GraphBuilder, Value], object], message: str | None) -> None:
    b, x = started()
    with pytest.raises(ShapeError) as error:
        make(b, x)
    text = re.sub(r"graph/test_build\.py:\d+", "LINE", str(error.value))
    if message is None:
        assert text.startswith("swish 'swish': op 'swish': unknown: have abs, add, ")
    else:
        assert text == message


def test_appends_chain() -> None:
    b, x = started()
    t = b.dim("t", Role.BATCH, upper=8)
    cache, slots = b.state("kv", F32, 3, 1, 2, 4), b.input("slots", I32, t)
    rows = b.op("split_heads", x, num_heads=1)
    first = b.append(cache, rows, slots)
    second = b.append(first, rows, slots)
    with pytest.raises(ShapeError):
        b.append(cache, rows, slots)
    graph = b.build()
    assert graph.state_outputs == (("kv", second.name),)
    verify(graph)
