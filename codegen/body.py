"""Bodies: a fused group as a small graph of its own with normalised names, so that equal layers of
a model give equal kernels, and the binding back to the model's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.graph import Graph, Group, Input, Node, State, Weight, WeightExpr
from tilewright.graph.dims import Dim, symbols_of
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.types import BF16, U8, BlockFormat, TensorType


@dataclass(frozen=True)
class Body:
    """`graph` is the normalised body; `binding` maps its outputs, states, inputs and weights to the
    names of the model graph (views resolved to the value that owns the buffer)."""

    graph: Graph
    binding: Mapping[str, str]
    nodes: Mapping[str, str]  # body node -> model node
    buffers: tuple[tuple[str, TensorType], ...]  # operands that are views -> type of their buffer


class _Names:
    """Hands out normalised names in order of first use."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self._count: dict[str, int] = {}

    def add(self, value: str, prefix: str) -> str:
        if value not in self.of:
            number = self._count.get(prefix, 0)
            self._count[prefix] = number + 1
            self.of[value] = f"{prefix}{number}"
        return self.of[value]


def root_of(graph: Graph, value: str) -> str:
    """Return the value whose buffer `value` is: through views, and through appends to their
    state."""
    while value in graph.node:
        node = graph.node[value]
        if node.op not in VIEWS and op_def(node.op).kind is not Kind.STORE:
            break
        value = node.inputs[0]
    return value


def memory_type(graph: Graph, value: str) -> TensorType:
    """Return the type a value has in memory: quantised states are packed rows of bytes, quantised
    values between kernels are bf16, which holds them exactly; all else is what its type says."""
    type_ = graph.type_of(value)
    if not isinstance(type_.dtype, BlockFormat) or value in graph.weight:
        return type_
    if root_of(graph, value) not in graph.state:
        return type_.with_dtype(BF16)
    *outer, width = type_.shape
    return TensorType(U8, (*outer, type_.dtype.row_bytes(int(width))))


def _output_views(graph: Graph) -> dict[str, TensorType]:
    """Map the memory of outputs to the type it is passed with: a view gives its own."""
    return {root_of(graph, value): memory_type(graph, value) for _, value in graph.outputs}


def extract(graph: Graph, group: Group) -> Body:
    """Return the body of a group."""
    members = _with_inner_views(graph, group)
    names, types = _Names(), dict[str, TensorType]()
    nodes: list[Node] = []
    for name in members:
        node = graph.node[name]
        operands = tuple(_operand(graph, members, names, types, i) for i in node.inputs)
        nodes.append(Node(names.add(name, "v"), node.op, operands, node.attrs, node.type))
    outputs, state_outputs = _results(graph, group, members, names)
    inside = {n: m for m, n in names.of.items()}
    binding = {n: root_of(graph, inside[n]) for n in types}
    binding |= {names.of[value]: value for value in outputs}
    body = replace(
        _declarations(graph, group, nodes, types),
        outputs=tuple((names.of[v], names.of[v]) for v in outputs),
        state_outputs=tuple((names.of[s], names.of[v]) for s, v in state_outputs),
    )
    views = _output_views(graph)
    seen = {**types, **{names.of[value]: graph.type_of(value) for value in outputs}}
    memory = {n: views.get(binding[n]) or memory_type(graph, binding[n]) for n in seen}
    buffers = tuple((n, memory[n]) for n, type_ in seen.items() if type_ != memory[n])
    return Body(body, binding, {names.of[n]: n for n in members}, buffers)


def _with_inner_views(graph: Graph, group: Group) -> tuple[str, ...]:
    """Members plus the views between them, in graph order."""
    inside = set(group.nodes)
    needed: set[str] = set()
    for name in group.nodes:
        for operand in graph.node[name].inputs:
            chain = []
            while operand in graph.node and graph.node[operand].op in VIEWS:
                chain.append(operand)
                operand = graph.node[operand].inputs[0]
            store = operand in inside and op_def(graph.node[operand].op).kind is Kind.STORE
            if operand in inside and not store:
                needed.update(chain)
    return tuple(sorted(inside | needed, key=graph.position.__getitem__))


def _operand(
    graph: Graph, members: tuple[str, ...], names: _Names, types: dict[str, TensorType], value: str
) -> str:
    if value in members:
        return names.of[value]
    root = root_of(graph, value)
    if root in graph.weight:
        prefix, key = "w", value
    elif root in graph.state:
        prefix, key = "s", root
    else:
        prefix, key = "x", value
    name = names.add(key, prefix)
    types[name] = graph.type_of(value)
    return name


def _results(
    graph: Graph, group: Group, members: tuple[str, ...], names: _Names
) -> tuple[list[str], list[tuple[str, str]]]:
    """Values other kernels or the caller read, and next states."""
    inside = set(members)
    kept = {root_of(graph, v) for v in graph.output_values}
    outputs, states = [], []
    for name in group.nodes:
        node = graph.node[name]
        if op_def(node.op).kind is Kind.STORE:
            states.append((root_of(graph, name), name))
        elif name in kept or _read_outside(graph, inside, name):
            outputs.append(name)
    return outputs, states


def _read_outside(graph: Graph, inside: set[str], name: str) -> bool:
    """Say whether a node outside, that is no view of the value, reads it."""
    for user in graph.users[name]:
        if graph.node[user].op in VIEWS:
            if _read_outside(graph, inside, user) or user in graph.output_values:
                return True
        elif user not in inside:
            return True
    return False


def _declarations(
    graph: Graph, group: Group, nodes: Sequence[Node], types: Mapping[str, TensorType]
) -> Graph:
    """Return the body without outputs: its operands declared, and the dims they use."""

    def named(prefix: str) -> list[str]:
        return [n for n in types if n[0] == prefix]

    extents: list[Dim] = [d for t in types.values() for d in t.shape]
    used = symbols_of([*extents, *(d for n in nodes for d in n.type.shape)])
    return Graph(
        name=group.kind,
        dims=tuple(sorted((d for d in graph.dims if d.name in used), key=lambda d: d.name)),
        inputs=tuple(Input(n, types[n]) for n in named("x")),
        states=tuple(State(n, types[n]) for n in named("s")),
        weights=tuple(Weight(n, types[n], WeightExpr("tensor", (n,))) for n in named("w")),
        nodes=tuple(nodes),
        outputs=(),
    )
