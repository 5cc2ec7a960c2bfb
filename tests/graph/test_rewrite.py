"""Rules as text in, text out; what the driver refuses; the generic passes keep values."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.graph import Graph, GraphBuilder, Node, Role
from tilewright.graph.errors import LowerError, VerifyError
from tilewright.graph.ops import OPS, Kind
from tilewright.graph.reference import HONOUR_CASTS, IDEAL_F64, Precision, run
from tilewright.graph.rewrite import (
    Applied,
    Bound,
    Edit,
    Ref,
    Rule,
    View,
    apply_rules,
    canonical_order,
    eliminate_dead,
    expand_composites,
    merge_equal,
    pattern,
)
from tilewright.graph.text import parse_graph, print_graph
from tilewright.graph.types import BF16, F32, I32
from tilewright.graph.verify import Stage, verify

HEAD = """graph g
dim t batch 1..64
input x: f32[t, 4]
input y: f32[t, 4]
"""


def rewritten(text: str, *rules: Rule) -> tuple[str, list[Applied]]:
    graph, applied = apply_rules(parse_graph(HEAD + text), rules)
    assert print_graph(graph).startswith(HEAD)
    return print_graph(graph).removeprefix(HEAD), applied


def refusal(text: str, *rules: Rule) -> str:
    with pytest.raises((LowerError, VerifyError)) as error:
        rewritten(text, *rules)
    return str(error.value)


def becomes(op: str) -> Callable[[Edit, Node, Bound], Ref]:
    return lambda edit, node, bound: edit.op(op, *bound.values())


DOUBLE_NEG = Rule(
    "double_neg", pattern("neg", pattern("neg", "x")), lambda edit, node, bound: bound["x"]
)
SQUARE = Rule("square", pattern("mul", "x", "x"), becomes("square"))
SILU = Rule("silu", pattern("mul", "x", pattern("sigmoid", "x")), becomes("silu"))


def test_a_replacement_keeps_name_and_origin() -> None:
    text, applied = rewritten("node a: f32[t, 4] = mul(x, x)  # m.py:3\noutput o = a\n", SQUARE)
    assert text == "node a: f32[t, 4] = square(x)  # m.py:3\noutput o = a\n"
    assert applied == [Applied("square", "a")]


def test_the_same_variable_must_be_the_same_value() -> None:
    text = "node a: f32[t, 4] = mul(x, y)\noutput o = a\n"
    assert rewritten(text, SQUARE) == (text, [])


def test_a_value_that_lost_its_reader_is_gone() -> None:
    text, _ = rewritten(
        "node s: f32[t, 4] = sigmoid(x)\nnode a: f32[t, 4] = mul(x, s)\noutput o = a\n", SILU
    )
    assert text == "node a: f32[t, 4] = silu(x)\noutput o = a\n"


def test_a_value_with_another_reader_stays() -> None:
    text, _ = rewritten(
        "node s: f32[t, 4] = sigmoid(x)\nnode a: f32[t, 4] = mul(x, s)\n"
        "node b: f32[t, 4] = add(a, s)\noutput o = b\n", SILU
    )
    assert text == (
        "node s: f32[t, 4] = sigmoid(x)\nnode a: f32[t, 4] = silu(x)\n"
        "node b: f32[t, 4] = add(a, s)\noutput o = b\n"
    )


def test_an_output_moves_to_the_existing_value() -> None:
    text, applied = rewritten(
        "node a: f32[t, 4] = neg(x)\nnode b: f32[t, 4] = neg(a)\nnode c: f32[t, 4] = neg(b)\n"
        "node d: f32[t, 4] = neg(c)\noutput o = d\noutput p = b\n", DOUBLE_NEG
    )
    assert text == "output o = x\noutput p = x\n"
    assert [a.rule for a in applied] == ["double_neg", "double_neg"]


def test_earlier_rules_win_and_new_nodes_are_rewritten_too() -> None:
    to_mul = Rule(
        "to_mul", pattern("add", "x", "x"),
        lambda edit, node, bound: edit.op("scale", edit.op("mul", bound["x"], bound["x"]),
                                          factor=2.0),
    )
    text, applied = rewritten(
        "node a: f32[t, 4] = add(x, x)  # m.py:3\noutput o = a\n", to_mul, SQUARE
    )
    assert text == (
        "node a.mul: f32[t, 4] = square(x)  # m.py:3\n"
        "node a: f32[t, 4] = scale(a.mul, factor=2.0)  # m.py:3\noutput o = a\n"
    )
    assert applied == [Applied("to_mul", "a"), Applied("square", "a.mul")]


def test_attributes_in_patterns_tell_minus_zero() -> None:
    rule = Rule("add_zero", pattern("shift", "x", amount=0.0), lambda e, n, bound: bound["x"])
    minus = "node a: f32[t, 4] = shift(x, amount=-0.0)\noutput o = a\n"
    assert rewritten(minus, rule) == (minus, [])
    assert rewritten(minus.replace("-0.0", "0.0"), rule)[0] == "output o = x\n"


def test_rules_see_users_and_outputs() -> None:
    seen: list[tuple[list[str], bool]] = []

    def match(view: View, node: Node) -> Bound | None:
        if node.name == "a":
            seen.append(([u.name for u in view.users("a")], view.is_output("a")))
        return None

    rewritten("node a: f32[t, 4] = neg(x)\nnode b: f32[t, 4] = exp(a)\noutput o = b\n",
              Rule("look", match, becomes("neg")))
    assert seen == [(["b"], False)]


CAST = 'node c: bf16[t, 4] = cast(x, dtype="bf16")  # m.py:5\n'


@pytest.mark.parametrize(
    ("text", "rule", "message"),
    [
        ("node a: f32[t, 4] = neg(x)\noutput o = a\n",
         Rule("spin", pattern("neg", "x"), becomes("neg")),
         "rule 'spin': does not end at neg 'a': got over 64 applications, want fewer"),
        ("node a: f32[t, 4] = neg(x)\noutput o = a\n",
         Rule("grow", pattern("neg", "x"),
              lambda e, n, bound: e.op("neg", e.op("neg", e.op("neg", bound["x"])))),
         "rule 'grow': does not end at neg 'a': got over 64 applications, want fewer"),
        ("node a: f32[t, 4] = neg(x)  # m.py:4\noutput o = a\n",
         Rule("narrow", pattern("neg", "x"), becomes("reduce_sum")),
         "rule 'narrow': changes the type at neg 'a': got f32[t, 1], want f32[t, 4] (m.py:4)"),
        ("node a: f32[t, 4] = neg(x)\noutput o = a\n",
         Rule("absent", pattern("neg", "x"), lambda e, n, bound: Ref("q", n.type)),
         "rule 'absent': returns an unknown value at neg 'a': got q, want a value of the graph"),
        ("node a: f32[t, 4] = neg(x)\noutput o = a\n",
         Rule("dangling", pattern("neg", "x"), lambda e, n, b: e.op("exp", Ref("q", n.type))),
         "rule 'dangling': exp: operand not defined: got q, want a value in reach (at neg 'a')"),
        ("node a: f32[t, 4] = neg(x)\noutput o = a\n",
         Rule("round", pattern("neg", "x"),
              lambda e, n, b: e.op("neg", e.op("cast", b["x"], dtype="bf16"))),
         "rule 'round': moves a cast at neg 'a': got a cast made or replaced, want casts "
         "untouched"),
        (CAST + "output o = c\n",
         Rule("recast", pattern("cast", "x"), lambda e, n, b: e.op("cast", b["x"], dtype="bf16")),
         "rule 'recast': moves a cast at cast 'c': got a cast made or replaced, want casts "
         "untouched (m.py:5)"),
        (CAST + "node a: f32[t, 4] = neg(c)\noutput o = a\n",
         Rule("skip_cast", pattern("neg", pattern("cast", "x")), becomes("neg")),
         "rule 'skip_cast': removes a cast at neg 'a': got no reader of c, want casts untouched"),
    ],
)
def test_messages(text: str, rule: Rule, message: str) -> None:
    assert refusal(text, rule) == message


def test_groups_are_refused() -> None:
    text = "node a: f32[t, 4] = neg(x)\noutput o = a\ngroup k elementwise: a\n"
    message = "graph 'g': fused already: got 1 groups, want none; rewrite before fusing"
    assert refusal(text, SQUARE) == message


def model(num_layers: int) -> Graph:
    """A decoder in miniature: norm, gated product, cache, attention, residual."""
    b = GraphBuilder("model")
    t, r = b.dim("t", Role.BATCH, upper=16), b.dim("r", Role.BATCH, upper=4)
    blocks = b.dim("blocks", Role.BATCH)
    x = b.input("x", F32, t, 8)
    slots, positions = b.input("slots", I32, t), b.input("positions", I32, t)
    rows, tables = b.input("rows", I32, t), b.input("tables", I32, r, 2)
    for i in range(num_layers):
        kv = b.state(f"kv.{i}", BF16, blocks, 2, 4, 4)
        weights = [b.weight(f"w.{i}.{k}", F32, 8, 8) for k in range(4)]
        scale = b.weight(f"norm.{i}", F32, 8)
        with b.scope(f"layers.{i}"):
            h = b.cast(b.rms_norm(x, scale, eps=1e-5), BF16)
            q, k = (b.cast(b.op("split_heads", b.linear(h, w), num_heads=2), BF16)
                    for w in weights[:2])
            cache = b.append(kv, k, slots)
            mixed = b.op("attend", q, cache, cache, positions, rows, tables, scale=0.5)
            x = b.cast(x + b.op("merge_heads", mixed), BF16)
            gate = b.silu(b.linear(x, weights[2])) * b.op("softmax", b.linear(x, weights[3]))
            x = b.cast(x + gate, BF16)
    b.output("out", x)
    return b.build()


def test_expand_composites_text(golden: Any) -> None:
    graph, applied = expand_composites(model(1))
    lines = [line.split("  # ")[0] for line in print_graph(graph).splitlines()]
    golden("\n".join([*lines, *(f"{a.rule}: {a.node}" for a in applied)]) + "\n")


def test_expansion_keeps_origins_and_casts() -> None:
    graph = model(2)
    expanded, applied = expand_composites(graph)
    assert [a.node for a in applied] == [
        n.name for n in graph.nodes if OPS[n.op].kind is Kind.COMPOSITE
    ]
    origins = {n.name: n.origin for n in graph.nodes}
    for node in expanded.nodes:
        source = next(o for o in (node.name, node.name.rpartition(".")[0]) if o in origins)
        assert node.origin == origins[source]
    assert casts(expanded) == casts(graph)
    verify(expanded, Stage.DECOMPOSED)


def casts(graph: Graph) -> Counter[tuple[str, object]]:
    return Counter((n.op, n.attr["dtype"]) for n in graph.nodes if n.op == "cast")


def values(graph: Graph, precision: Precision = IDEAL_F64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = {i.name: torch.randn(3, 4) for i in graph.inputs}
    weights = {w.name: torch.randn(w.type.shape) for w in graph.weights if w.expr.kind == "tensor"}
    return list(run(graph, inputs, states={}, weights=weights, precision=precision)
                .outputs.values())


@settings(max_examples=15)
@given(data=st.data())
def test_passes_keep_values(data: st.DataObject, graphs: Any) -> None:
    graph = data.draw(graphs)
    expected = values(graph)
    for a, b in zip(values(expand_composites(graph)[0]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    exact = values(graph, HONOUR_CASTS)
    for simplify in (eliminate_dead, merge_equal, canonical_order):
        result = simplify(graph)
        verify(result)
        for a, b in zip(values(result, HONOUR_CASTS), exact, strict=True):
            assert torch.equal(a, b)
    alive = eliminate_dead(graph)
    assert all(alive.users[n.name] or n.name in alive.output_values for n in alive.nodes)


@given(data=st.data(), seed=st.integers(0, 1000))
def test_canonical_order_ignores_order_and_names(
    data: st.DataObject, seed: int, graphs: Any, shuffled: Any
) -> None:
    graph = eliminate_dead(data.draw(graphs))
    other = canonical_order(shuffled(graph, random.Random(seed)))
    assert numbered(other) == numbered(canonical_order(graph))


def numbered(graph: Graph) -> list[tuple[object, ...]]:
    """Nodes with their operands as positions, names left out; then the outputs."""
    at: dict[str, object] = {n.name: i for i, n in enumerate(graph.nodes)}
    nodes: list[tuple[object, ...]] = [
        (n.op, repr(n.attrs), tuple(at.get(i, i) for i in n.inputs), str(n.type))
        for n in graph.nodes
    ]
    return [*nodes, tuple((public, at.get(v, v)) for public, v in graph.outputs)]


def test_canonical_order_of_dead_nodes_ignores_order_and_names(shuffled: Any) -> None:
    dead = "".join(f"node {op}: f32[t, 4] = {op}(x)\n" for op in ("neg", "abs", "exp", "sin"))
    graph = parse_graph(HEAD + dead + "node a: f32[t, 4] = add(x, y)\noutput o = a\n")
    orders = {
        tuple(map(str, numbered(canonical_order(shuffled(graph, random.Random(seed))))))
        for seed in range(12)
    }
    assert len(orders) == 1


def test_merge_equal_text() -> None:
    graph = parse_graph(
        HEAD + CAST + CAST.replace("node c", "node d")
        + "node e: f32[t, 4] = scale(c, factor=0.0)\nnode f: f32[t, 4] = scale(d, factor=-0.0)\n"
        "node g: f32[t, 4] = scale(d, factor=0.0)\noutput e = e\noutput f = f\noutput g = g\n"
    )
    assert print_graph(merge_equal(graph)) == HEAD + CAST + (
        "node e: f32[t, 4] = scale(c, factor=0.0)\nnode f: f32[t, 4] = scale(c, factor=-0.0)\n"
        "output e = e\noutput f = f\noutput g = e\n"
    )


def test_merge_equal_never_merges_stores() -> None:
    graph = model(1)
    store = next(n for n in graph.nodes if n.op == "append")
    twin = replace(store, name="twin")
    assert len(merge_equal(graph.with_nodes((*graph.nodes, twin))).nodes) == len(graph.nodes) + 1


def test_eliminate_dead_keeps_checkpoint_tensors_declared() -> None:
    graph = parse_graph(
        HEAD + 'weight w: f32[4] = tensor("w")\nweight k: f32[4] = literal(1.0, 2.0, 3.0, 4.0)\n'
        "node a: f32[t, 4] = mul(x, w)\nnode b: f32[t, 4] = mul(x, k)\nnode c: f32[t, 4] = neg(x)\n"
        "output o = c\n"
    )
    result = eliminate_dead(graph)
    assert [n.name for n in result.nodes] == ["c"]
    assert [w.name for w in result.weights] == ["w"]
    with pytest.raises(VerifyError) as error:
        verify(result)
    assert str(error.value) == "weight 'w': is not used: got no reader, want at least one"


def test_a_deep_model_takes_well_under_a_second() -> None:
    graph = model(50)
    assert len(graph.nodes) > 800
    best = min(_seconds(graph) for _ in range(3))
    assert best < 0.5, f"took {best:.2f} s"


def _seconds(graph: Graph) -> float:
    start = time.process_time()
    expanded, _ = expand_composites(graph)
    canonical_order(merge_equal(eliminate_dead(expanded)))
    return time.process_time() - start
