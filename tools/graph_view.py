"""What of a graph is drawn: one layer of every run of equal layers, with everything around them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.graph import Graph, Group, Node
from tilewright.graph.text import print_node
from tilewright.tools.svg_graph import Box, Edge, Span

_LAYER = re.compile(r"([A-Za-z_][\w.]*?)\.(\d+)\.(.+)")
MAX_LINES = 14


@dataclass(frozen=True)
class View:
    """Boxes and edges of a drawing, the marks of repeated layers, and how many layers they hide."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Layers:
    """Which layer stands for which: names of nodes map to those of the layer that is drawn."""

    runs: tuple[tuple[str, int, int], ...]  # stack, first layer, number of layers
    first_of: Mapping[tuple[str, int], int]

    def shown(self, name: str) -> str:
        """Return the node that is drawn for a node."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return name
        stack, layer, rest = match.group(1), int(match.group(2)), match.group(3)
        first = self.first_of.get((stack, layer), layer)
        return f"{stack}.{first}.{rest}"

    def is_shown(self, name: str) -> bool:
        return self.shown(name) == name


def layer_of(name: str) -> tuple[str, int] | None:
    """Return (stack, number) of a node such as layers.3.q_proj, or None."""
    match = _LAYER.fullmatch(name)
    return (match.group(1), int(match.group(2))) if match else None


def find_layers(graph: Graph) -> Layers:
    """Group consecutive layers that compute the same: equal ops, types, attributes and edges."""
    layers: dict[tuple[str, int], list[Node]] = {}
    for node in graph.nodes:
        key = layer_of(node.name)
        if key is not None:
            layers.setdefault(key, []).append(node)
    runs: list[tuple[str, int, int]] = []
    first_of: dict[tuple[str, int], int] = {}
    before: tuple[object, ...] = ()
    for (stack, number), nodes in sorted(layers.items()):
        shape = _shape(graph, stack, number, nodes)
        if runs and runs[-1][0] == stack and sum(runs[-1][1:]) == number and shape == before:
            runs[-1] = (stack, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((stack, number, 1))
        first_of[stack, number] = runs[-1][1]
        before = shape
    return Layers(tuple(runs), first_of)


def _shape(graph: Graph, stack: str, number: int, nodes: Sequence[Node]) -> tuple[object, ...]:
    """A layer's facts without its number; what comes from other layers counts as outside."""
    inside = {n.name for n in nodes}

    def short(value: str) -> str:
        if value in inside:
            return value.removeprefix(f"{stack}.{number}.")
        return "outside" if value in graph.node else str(graph.type_of(value))

    return tuple(
        (
            short(n.name),
            n.op,
            n.attrs,
            str(n.type),
            tuple(map(short, n.inputs)),
            short(graph.group_of[n.name].name) if n.name in graph.group_of else None,
        )
        for n in nodes
    )


def view_nodes(graph: Graph) -> View:
    """Draw one box a node, for the graph as the model states it."""
    layers = find_layers(graph)
    drawn = [n for n in graph.nodes if layers.is_shown(n.name)]
    boxes = [Box(n.name, f"op {n.op}", n.op, (_short(n.name),), print_node(n)) for n in drawn]
    owner = {n.name: n.name for n in graph.nodes}
    return _assemble(graph, layers, boxes, owner)


def view_groups(graph: Graph) -> View:
    """Draw one box a fused group, with the ops it computes."""
    layers = find_layers(graph)
    drawn = [g for g in graph.groups if layers.is_shown(g.name)]
    boxes = [_group_box(graph, group) for group in drawn]
    owner = {name: g.name for g in graph.groups for name in g.nodes}
    grouped = {v: owner[u] for v, u in _view_users(graph, owner).items()}
    return _assemble(graph, layers, boxes, {**owner, **grouped})


def _view_users(graph: Graph, owner: Mapping[str, str]) -> dict[str, str]:
    """Reshapes outside all groups belong to what they reshape."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.name not in owner:
            source = node.inputs[0]
            found[node.name] = found.get(source, source)
    return {name: source for name, source in found.items() if source in owner}


def _group_box(graph: Graph, group: Group) -> Box:
    ops = [graph.node[name].op for name in group.nodes]
    lines = _wrapped(ops)
    tip = "\n".join(print_node(graph.node[name]) for name in group.nodes)
    return Box(group.name, f"group {group.kind}", f"{_short(group.name)}", lines, tip)


def _wrapped(ops: Sequence[str]) -> tuple[str, ...]:
    """Ops in order, runs counted, a few on each line."""
    lines: list[str] = [""]
    for op in ops:
        if len(lines[-1]) + len(op) > 34:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{op}"
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], "..."]
    return tuple(lines)


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"


def _assemble(graph: Graph, layers: Layers, boxes: Sequence[Box], owner: Mapping[str, str]) -> View:
    """Add inputs, states and outputs that the boxes touch, all edges, and the marks of layers."""
    ids = {b.id for b in boxes}
    rank = {b.id: i for i, b in enumerate(boxes)}
    outside: dict[str, Box] = {}
    edges: dict[tuple[str, str], Edge] = {}
    for node in graph.nodes:
        target = owner.get(node.name)
        if target not in ids:
            continue
        for value in node.inputs:
            source = layers.shown(owner[value]) if value in owner else value
            if value in graph.weight or source == target or value == node.name:
                continue
            if source not in rank and source not in outside:
                outside[source] = _value_box(graph, source)
            if rank.get(source, -1) < rank[str(target)]:  # else the layer before: not drawn
                tip = f"{value}: {graph.type_of(value)}"
                edges.setdefault((source, str(target)), Edge(source, str(target), tip))
    for public, value in graph.outputs:
        box = Box(f"output {public}", "value", public, (), f"output {public} = {value}")
        outside[box.id] = box
        source = layers.shown(owner[value])
        edges[source, box.id] = Edge(source, box.id, f"{value}: {graph.type_of(value)}")
    spans = [_span(run, boxes) for run in layers.runs if run[2] > 1]
    return View((*outside.values(), *boxes), tuple(edges.values()), tuple(spans))


def _value_box(graph: Graph, name: str) -> Box:
    kind = "state" if name in graph.state else "value"
    return Box(name, kind, name, (), f"{name}: {graph.type_of(name)}")


def _span(run: tuple[str, int, int], boxes: Sequence[Box]) -> Span:
    stack, first, count = run
    inside = tuple(b.id for b in boxes if layer_of(b.id) == (stack, first))
    label = f"{stack} {first} to {first + count - 1}: {count} times the same"
    return Span(inside, label)
