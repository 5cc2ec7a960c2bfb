"""Each rule of each stage is broken once, as text, and the message is compared in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.graph.errors import VerifyError
from tilewright.graph.ops import OPS, Kind
from tilewright.graph.text import parse_graph
from tilewright.graph.types import BF16
from tilewright.graph.verify import Stage, verify

GOOD = """
graph g
dim t batch 1..64
input x: f32[t, 4]
input slots: i32[t]
state kv: bf16[9, 1, 16, 4] block 1
weight w: f32[4] = tensor("w")
weight half: f32[2] = literal(0.5, 1.0)
node n: f32[t, 4] = rms_norm(x, w, eps=1e-05)  # models/m.py:1
node s: f32[t, 2, 2] = split_heads(n, num_heads=2)  # models/m.py:2
node m: f32[t, 2, 2] = mul(s, half)  # models/m.py:3
node e: f32[t, 1, 4] = split_heads(n, num_heads=1)  # models/m.py:4
node c: bf16[t, 1, 4] = cast(e, dtype="bf16")  # models/m.py:5
node a: bf16[9, 1, 16, 4] = append(kv, c, slots)  # models/m.py:6
output y = m
next kv = a
"""
FUSED = GOOD.replace(
    'rms_norm(x, w, eps=1e-05)', "mul(x, w)"
) + "group g0 elementwise: n m\ngroup g1 store: c a\n"


def check(text: str, stage: Stage = Stage.MODEL) -> None:
    verify(parse_graph(text), stage)


def refusal(text: str, stage: Stage = Stage.MODEL) -> str:
    with pytest.raises(VerifyError) as error:
        check(text, stage)
    return str(error.value)


def test_good_graphs_pass() -> None:
    check(GOOD)
    check(GOOD.replace("rms_norm(x, w, eps=1e-05)", "mul(x, w)"), Stage.DECOMPOSED)
    check(FUSED, Stage.FUSED)


@given(data=st.data())
def test_built_graphs_pass(data: st.DataObject, graphs: Any) -> None:
    verify(data.draw(graphs))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("input slots", "input x: i32[t]\ninput slots",
         "input 'x': name taken: got a second x, want one value a name"),
        ("node s:", "node n:", "split_heads 'n': name taken: got a second n, want one value a name "
         "(models/m.py:2)"),
        ("dim t batch 1..64", "dim t batch 1..64\ndim t batch 1..64",
         "dim 't': declared more than once: got 2, want 1"),
        ("output y = m", "output y = m\noutput y = n",
         "output 'y': declared more than once: got 2, want 1"),
        ("dim t", "dim u", "input 'x': dim not declared: got t, want one of u"),
        ("block 1", "page 1", "state 'kv': unknown scope: got page, want block or window"),
        ("block 1", "block 0",
         "state 'kv': positions per entry out of range: got 0, want at least 1"),
        ("weight w: f32[4]", "weight w: f32[t]",
         "weight 'w': extents are not constant: got f32[t], want ints"),
        ('tensor("w")', 'file("w")',
         "weight 'w': unknown expression: got file, want tensor or literal"),
        ('tensor("w")', "tensor(1)", "weight 'w': not one tensor's name: got 1, want one name"),
        ("literal(0.5, 1.0)", "literal(0.5)",
         "weight 'half': literal does not fit its type: got 1 values, want f32[2]"),
        ("literal(0.5, 1.0)", "literal(0.5, 1)",
         "weight 'half': literal is not a float: got 1, want floats"),
        ("weight half: f32[2]", "weight half: i32[2]",
         "weight 'half': type cannot hold a literal: got i32[2], want plain floats"),
        ("split_heads(n, num_heads=2)", "split_heads(m, num_heads=2)",
         "split_heads 's': out of order: got operand m below it, want it above (models/m.py:2)"),
        ("mul(s, half)", "mul(s, third)",
         "mul 'm': operand not defined: got third, want a value of the graph (models/m.py:3)"),
        ("mul(s, half)", "mull(s, half)", "mull 'm': unknown op: got mull, want one of "
         f"{', '.join(sorted(OPS))} (models/m.py:3)"),
        ("eps=1e-05", "eps=1e-05, eps=1e-06",
         "rms_norm 'n': attributes out of order: got eps, eps, want each once, by name "
         "(models/m.py:1)"),
        ("eps=1e-05", "eps=1",
         "rms_norm 'n': attribute 'eps' has the wrong type: got int, want float (models/m.py:1)"),
        ("eps=1e-05", "eps=nan",
         "rms_norm 'n': attribute 'eps' is not a number: got nan, want a float (models/m.py:1)"),
        ("num_heads=2", "num_heads=3",
         "split_heads 's': heads do not divide the last axis: got f32[t, 4], want a multiple of 3 "
         "(models/m.py:2)"),
        ("node m: f32[t, 2, 2]", "node m: f32[t, 4]",
         "mul 'm': type does not follow from its operands: got f32[t, 4], want f32[t, 2, 2] "
         "(models/m.py:3)"),
        ("output y = m", "output y = z",
         "output 'y': value not defined: got z, want a value of the graph"),
        ("append(kv, c, slots)", "append(c2, c, slots)",
         "append 'a': operand not defined: got c2, want a value of the graph (models/m.py:6)"),
        ("next kv = a", "next kv = kv", "state 'kv': wrong next content: got kv, want a"),
        ("next kv = a", "", "state 'kv': wrong next content: got none, want a"),
        ("next kv = a", "next kv = a\nnext x = a",
         "graph 'g': states and next contents differ: got kv, x, want kv"),
        ("next kv = a", "node b: bf16[9, 1, 16, 4] = append(kv, c, slots)\nnext kv = a",
         "append 'b': second writer of a state: got kv, want a chain after a"),
        ("next kv = a", "node b: bf16[t, 1, 16, 4] = gather_rows(kv, slots)\nnext kv = a",
         "append 'a': replaced value 'kv' is read: got gather_rows 'b', want no reader "
         "(models/m.py:6)"),
        ("output y = m", "output y = m\noutput old = kv",
         "append 'a': replaced value 'kv' is read: got output 'old', want no reader "
         "(models/m.py:6)"),
        ("state kv", "input other: bf16[9, 1, 16, 4]\nnode b: bf16[9, 1, 16, 4] = append(other, c, "
         "slots)\nstate kv",
         "append 'b': out of order: got operand c below it, want it above"),
        ("next kv", "weight z: f32[4] = tensor(\"z\")\nnext kv",
         "weight 'z': is not used: got no reader, want at least one"),
        ("next kv", "group g0 cast: c\nnext kv",
         "graph 'g': has groups too early: got 1, want none"),
    ],
)
def test_messages(old: str, new: str, message: str) -> None:
    assert GOOD.count(old) >= 1
    assert refusal(GOOD.replace(old, new, 1)) == message


def test_a_store_into_no_state() -> None:
    text = GOOD.replace("state kv: bf16[9, 1, 16, 4] block 1", "input kv: bf16[9, 1, 16, 4]")
    assert refusal(text.replace("next kv = a", "")) == (
        "append 'a': stores into a value that is no state: got kv, want a state (models/m.py:6)"
    )


def test_a_chain_of_stores_is_one_writer() -> None:
    check(GOOD.replace(
        "next kv = a", "node b: bf16[9, 1, 16, 4] = append(a, c, slots)\nnext kv = b"
    ))


def test_a_graph_computes_something() -> None:
    assert refusal("graph g\n") == (
        "graph 'g': computes nothing: got no output, want at least one"
    )


def test_composites_are_gone_once_decomposed() -> None:
    assert refusal(GOOD, Stage.DECOMPOSED) == (
        "rms_norm 'n': composite in a decomposed graph: got rms_norm, want only ops that are not "
        "defined by others (models/m.py:1)"
    )


def test_only_casts_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounding = replace(OPS["neg"], infer=lambda inputs, attrs: inputs[0].with_dtype(BF16))
    assert rounding.kind is Kind.ELEMENTWISE
    monkeypatch.setitem(OPS, "neg", rounding)
    text = GOOD.replace("output y = m", "node r: bf16[t, 2, 2] = neg(m)\noutput y = r")
    assert refusal(text) == (
        "neg 'r': rounds its result: got bf16, want f32, rounded by a cast"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("elementwise: n m", "elementwise: n",
         "mul 'm': is in no group: got none, want one group (models/m.py:3)"),
        ("elementwise: n m", "elementwise: m n",
         "group 'g0': nodes out of order: got m, n, want n, m"),
        ("store: c a", "store: c a m",
         "group 'g1': node 'm' is taken: got also in g0, want one group"),
        ("store: c a", "store: c a\ngroup g2 store: z",
         "group 'g2': node not defined: got z, want a node of the graph"),
        ("store: c a", "store: c a\ngroup g2 store:",
         "group 'g2': is empty: got no node, want at least one"),
        ("store: c a", "store: c\ngroup g1 store: a",
         "group 'g1': declared more than once: got 2, want 1"),
        ("g0 elementwise: n m\ngroup g1 store: c a", "g1 store: c a\ngroup g0 elementwise: n m",
         "cast 'c': group 'g1' is out of order or not convex: got operand e of later group g0, "
         "want earlier groups only (models/m.py:5)"),
        ("g0 elementwise: n m\ngroup g1 store: c a", "g1 store: n a\ngroup g0 elementwise: m c",
         "append 'a': group 'g1' is out of order or not convex: got operand c of later group g0, "
         "want earlier groups only (models/m.py:6)"),
    ],
)
def test_group_messages(old: str, new: str, message: str) -> None:
    assert FUSED.count(old) == 1
    assert refusal(FUSED.replace(old, new), Stage.FUSED) == message


def test_views_may_stand_in_a_group() -> None:
    check(FUSED.replace("elementwise: n m", "elementwise: n s m"), Stage.FUSED)
