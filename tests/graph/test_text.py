"""Printing and parsing are inverse, byte for byte; malformed text is named by its line."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.graph import (
    DimDecl,
    Graph,
    GraphBuilder,
    Group,
    Input,
    Node,
    Role,
    State,
    TensorType,
    Weight,
    WeightExpr,
)
from tilewright.graph.dims import ceil_div, symbol
from tilewright.graph.errors import VerifyError
from tilewright.graph.text import parse_graph, print_graph
from tilewright.graph.types import BF16, BLOCK_FORMATS, DTYPES, F32, I32

names = st.one_of(st.from_regex(r"[a-z_][a-z0-9_./-]{0,6}", fullmatch=True), st.text(max_size=6))
scalars = st.one_of(
    st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.text(max_size=6)
)
attrs = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
extents = st.sampled_from(
    [1, 0, 64, symbol("t"), symbol("t") * 2 + 1, ceil_div(symbol("t") + symbol("r"), 128) * 3]
)
types = st.builds(
    TensorType,
    st.sampled_from([*DTYPES.values(), *BLOCK_FORMATS.values()]),
    st.lists(extents, max_size=4).map(tuple),
)
pairs = st.lists(st.tuples(names, names), max_size=3).map(tuple)


def tuples(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


any_graph = st.builds(
    Graph,
    name=names,
    dims=tuples(st.builds(DimDecl, st.sampled_from(["t", "r", "été"]), st.sampled_from(Role),
                          st.integers(0, 4), st.integers(4, 1 << 31))),
    inputs=tuples(st.builds(Input, names, types)),
    states=tuples(st.builds(State, names, types, names, st.integers(1, 9))),
    weights=tuples(st.builds(Weight, names, types, st.builds(WeightExpr, names, tuples(attrs)))),
    nodes=tuples(st.builds(Node, names, names, tuples(names), tuples(st.tuples(names, attrs)),
                           types, st.one_of(names, st.just("models/llama.py:41")))),
    outputs=pairs,
    state_outputs=pairs,
    groups=tuples(st.builds(Group, names, names, tuples(names))),
)


@settings(max_examples=25)
@given(any_graph)
def test_any_record_round_trips(graph: Graph) -> None:
    text = print_graph(graph)
    back = parse_graph(text)
    assert back == graph
    assert repr(back) == repr(graph)  # tells 0.0 from -0.0 and 1 from True
    assert print_graph(back) == text


@given(data=st.data())
def test_built_graphs_round_trip(data: st.DataObject, graphs: Any) -> None:
    graph = data.draw(graphs)
    assert parse_graph(print_graph(graph)) == graph


@given(st.integers(0, 10**6), st.text(alphabet='"#()[]=:,. \\x0-', max_size=3))
def test_damaged_text_is_an_error_with_its_line_or_a_graph(at: int, damage: str) -> None:
    text = print_graph(small())
    at %= len(text)
    try:
        parse_graph(text[:at] + damage + text[at + 2 :])
    except VerifyError as error:
        assert str(error).startswith("graph text")


def small() -> Graph:
    b = GraphBuilder("small")
    tokens = b.dim("tokens", Role.BATCH, upper=64)
    blocks = b.dim("blocks", Role.BATCH)
    x = b.input("x", F32, tokens, 8)
    slots = b.input("slots", I32, tokens)
    cache = b.state("kv.k", BF16, blocks, 2, 16, 4)
    w = b.weight("a weight", BLOCK_FORMATS["q4_1[g=32,axis=1,scale=f16]"], 8, 8)
    half = b.literal("half", [0.5, -0.0, 1e-05, math.inf, 1.0, 2.0, 0.1, 3.0], F32)
    with b.scope("layers.0"):
        k = b.cast(b.op("split_heads", b.linear(x * half, w, name="k"), num_heads=2), BF16)
        b.append(cache, k, slots)
    b.output("out", k)
    return b.build()


def test_print_small(golden: Any) -> None:
    golden(re.sub(r"  # .*", "", print_graph(small())))


def test_origins_are_printed_and_kept() -> None:
    graph = small()
    assert all(n.origin.startswith("graph/test_text.py:") for n in graph.nodes)
    assert [n.origin for n in parse_graph(print_graph(graph)).nodes] == [
        n.origin for n in graph.nodes
    ]


def test_blank_lines_and_comments_are_skipped() -> None:
    graph = small()
    text = print_graph(graph).replace("\n", "\n\n  # note\n")
    assert parse_graph(text) == graph


HEAD = "graph g\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "graph text: wrong number of 'graph' lines: got 0, want 1"),
        (HEAD + HEAD, "graph text: wrong number of 'graph' lines: got 2, want 1"),
        (HEAD + "nodes a",
         "graph text line 2: unknown keyword: got nodes, want graph, dim, input, state, weight, "
         "node, output, next, group"),
        (HEAD + "\ninput x f32[2]",
         "graph text line 3: malformed at column 9: got f32[2], want ':'"),
        (HEAD + "input x: f32",
         "graph text line 2: malformed at column 10: got f32, want a type, as f32[tokens, 64]"),
        (HEAD + "input x: f31[2]",
         "graph text line 2: element type 'f31': unknown: have "
         f"{', '.join([*DTYPES, *BLOCK_FORMATS])}"),
        (HEAD + "input x: f32[2] y",
         "graph text line 2: malformed at column 17: got y, want the end of the line"),
        (HEAD + "input x: f32[2,]",
         "graph text line 2: dim '': malformed: want int, name, add, mul, max, min or ceildiv by "
         "a positive int"),
        (HEAD + "dim t fast 1..2",
         "graph text line 2: unknown role: got fast, want batch or context"),
        (HEAD + "dim t batch 1.5..2",
         "graph text line 2: malformed at column 13: got 1.5..2, want an integer"),
        (HEAD + "dim t batch 3..2",
         "graph text line 2: dim 't': bounds out of order: got 3..2, want 0 <= lower <= upper"),
        (HEAD + "node a: f32[2] = add(x, y",
         "graph text line 2: malformed at column 26: got the end of the line, want ','"),
        (HEAD + "node a: f32[2] = scale(factor=1.0, x)",
         "graph text line 2: operand after an attribute: got x, want operands first"),
        (HEAD + "node a: f32[2] = scale(x, factor=)",
         "graph text line 2: malformed at column 34: got ), want a number"),
        (HEAD + 'node "a: f32[2] = neg(x)',
         'graph text line 2: malformed at column 6: got "a: f32[2] = neg(x), want a name'),
        (HEAD + "node a: f32[2] = k(x, n=" + "9" * 5000 + ")",
         f"graph text line 2: malformed at column 25: got {'9' * 24}, want a number of fewer "
         "digits"),
        (HEAD + "output a",
         "graph text line 2: malformed at column 9: got the end of the line, want '='"),
    ],
)
def test_messages(text: str, message: str) -> None:
    with pytest.raises(VerifyError) as error:
        parse_graph(text)
    assert str(error.value) == message
