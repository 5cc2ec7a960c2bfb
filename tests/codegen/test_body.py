"""Bodies: fused groups under normalised names, bound back to the values of the model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.graphs import random_graph
from support.tiny import tiny_graph
from tilewright.codegen.body import extract, root_of
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.text import parse_graph, print_graph
from tilewright.graph.types import F32


def check(graph: Graph) -> None:
    """Every body is a graph of its own: typed, printable, bound to values that own memory."""
    for group in graph.groups:
        body = extract(graph, group)
        assert print_graph(parse_graph(print_graph(body.graph))) == print_graph(body.graph)
        members = {name for name in body.nodes.values() if graph.node[name].op not in VIEWS}
        assert members == set(group.nodes)
        for name in [*(v for _, v in body.graph.outputs), *(i.name for i in body.graph.inputs)]:
            value = body.binding[name]
            assert root_of(graph, value) == value or value in graph.state
        stored = dict(body.buffers)
        for name, type_ in stored.items():
            assert type_.num_elements == body.graph.type_of(name).num_elements
            assert type_ != body.graph.type_of(name)


def test_bodies_of_a_model() -> None:
    check(lower(tiny_graph("q4_1", family="Qwen2ForCausalLM"), Flags()).graph)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_bodies_of_random_graphs(seed: int) -> None:
    check(lower(random_graph(seed, components=2).graph, Flags()).graph)


def test_values_read_outside_are_outputs() -> None:
    """Each value of a group that another group or the caller reads is an output, and no other."""
    graph = lower(tiny_graph(), Flags()).graph
    for group in graph.groups:
        body = extract(graph, group)
        inside = set(group.nodes)
        given = {body.binding[v] for _, v in body.graph.outputs}
        read = {
            root_of(graph, i)
            for n in graph.nodes
            if n.name not in inside and n.op not in VIEWS
            for i in n.inputs
        } | {root_of(graph, v) for _, v in graph.outputs}
        assert given == {n for n in group.nodes if n in read}


def test_an_output_that_is_a_view_keeps_its_own_shape() -> None:
    b = GraphBuilder("views")
    x = b.input("x", F32, b.dim("rows", Role.BATCH), 12)
    b.output("heads", b.op("split_heads", b.op("exp", x), num_heads=3))
    graph = lower(b.build(), Flags()).graph
    body = extract(graph, graph.groups[0])
    ((name, type_),) = body.buffers
    assert (name, str(type_)) == ("v0", "f32[rows, 3, 4]")
    assert str(body.graph.type_of("v0")) == "f32[rows, 12]"
