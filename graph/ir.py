"""The graph: typed nodes in topological order, with inputs, states, weights and outputs.

Records are frozen and a rewrite returns a new graph. An edge lives in `Node.inputs` and
nowhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import networkx

from tilewright.graph.dims import DimDecl
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import TensorType

Attr: TypeAlias = "int | float | str | bool | tuple[Attr, ...]"
Attrs: TypeAlias = Mapping[str, Attr]
WEIGHT_KINDS = ("tensor", "literal", "stack")


@dataclass(frozen=True)
class Node:
    """One op applied to named values. `origin` is the file:line of the model code that made it."""

    name: str
    op: str
    inputs: tuple[str, ...]
    attrs: tuple[tuple[str, Attr], ...]
    type: TensorType
    origin: str = ""

    @property
    def attr(self) -> dict[str, Attr]:
        return dict(self.attrs)


@dataclass(frozen=True)
class Input:
    """A tensor the caller gives at every step."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class State:
    """Cache or history that outlives a step. An append returns a new state value.

    One chain of appends a step writes it. `scope` says how long an entry lives: `block` entries as
    long as their request; `window` entries until they are `window` positions old, so that their
    blocks are given back. An entry stands for `positions_per_entry` positions.
    """

    name: str
    type: TensorType
    scope: str = "block"
    positions_per_entry: int = 1
    window: int = 0


@dataclass(frozen=True)
class WeightExpr:
    """How a weight comes from checkpoint tensors: `tensor(name)`, `literal(values)`, or
    `stack(names)`: equally shaped matrices [n, k], one after the other [len(names), n, k].
    """

    kind: str
    args: tuple[Attr, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors that the weight is made of."""
        return () if self.kind == "literal" else tuple(str(name) for name in self.args)


@dataclass(frozen=True)
class Weight:
    """A constant tensor of the model."""

    name: str
    type: TensorType
    expr: WeightExpr


@dataclass(frozen=True)
class Group:
    """Nodes that one kernel computes, in topological order; `kind` is the kind of the anchor op."""

    name: str
    kind: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """A whole model step. `nodes` are in topological order; value names are unique."""

    name: str
    dims: tuple[DimDecl, ...]
    inputs: tuple[Input, ...]
    states: tuple[State, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]  # (public name, value name)
    state_outputs: tuple[tuple[str, str], ...] = ()  # (state name, value that is its next content)
    groups: tuple[Group, ...] = field(default=())

    @cached_property
    def node(self) -> Mapping[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Where a node stands among the nodes."""
        return {n.name: i for i, n in enumerate(self.nodes)}

    @cached_property
    def dim(self) -> Mapping[str, DimDecl]:
        return {d.name: d for d in self.dims}

    @cached_property
    def weight(self) -> Mapping[str, Weight]:
        return {w.name: w for w in self.weights}

    @cached_property
    def state(self) -> Mapping[str, State]:
        return {s.name: s for s in self.states}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Type of every value: inputs, states, weights and nodes."""
        sources: tuple[Input | State | Weight | Node, ...] = (
            *self.inputs, *self.states, *self.weights, *self.nodes
        )
        return {s.name: s.type for s in sources}

    def type_of(self, name: str) -> TensorType:
        if name not in self.types:
            raise VerifyError(f"value '{name}': not defined in graph '{self.name}'")
        return self.types[name]

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the nodes that read each value, in graph order."""
        found: dict[str, list[str]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found.setdefault(name, []).append(node.name)
        return {name: tuple(users) for name, users in found.items()}

    @cached_property
    def output_values(self) -> frozenset[str]:
        """Values that must exist after the step: outputs and next states."""
        return frozenset(value for _, value in (*self.outputs, *self.state_outputs))

    @cached_property
    def group_of(self) -> Mapping[str, Group]:
        return {name: group for group in self.groups for name in group.nodes}

    @cached_property
    def view(self) -> networkx.DiGraph:
        """Read-only networkx view: one vertex a value, one edge an operand."""
        graph = networkx.DiGraph()
        graph.add_nodes_from(self.types)
        for node in self.nodes:
            graph.add_edges_from((source, node.name) for source in node.inputs)
        return networkx.freeze(graph)

    @cached_property
    def digest(self) -> str:
        """Hash of all that decides bits: types, ops, attributes and edges, but no origins."""
        return hashlib.sha256(repr(tuple(self._facts())).encode()).hexdigest()

    def _facts(self) -> Iterator[Any]:
        for decl in self.dims:
            yield ("dim", decl.name, decl.role.value)
        for kind, values in (("input", self.inputs), ("state", self.states)):
            for value in values:
                yield (kind, value.name, str(value.type))
        for weight in self.weights:
            yield ("weight", weight.name, str(weight.type), weight.expr)
        for node in self.nodes:
            yield ("node", node.name, node.op, node.inputs, node.attrs, str(node.type))
        yield ("outputs", self.outputs, self.state_outputs)

    def with_nodes(self, nodes: tuple[Node, ...]) -> Graph:
        return replace(self, nodes=nodes)
