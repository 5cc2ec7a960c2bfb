"""Symbolic cost of a fused body: operations, bytes moved, and the roofline time they imply."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.body import root_of
from tilewright.codegen.target import Target
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, normalise
from tilewright.graph.ops import op_def
from tilewright.graph.types import TensorType


@dataclass(frozen=True)
class BodyCost:
    """`flops` of all nodes, the bytes of operands and results that cross the kernel's border, and
    the bytes of weights among them."""

    flops: Dim
    num_bytes: Dim
    weight_bytes: Dim


def body_cost(body: Graph) -> BodyCost:
    """Return the cost of one launch. Of weights and states only what a step touches counts."""
    flops: Dim = 0
    weights: Dim = sum((_weight_bytes(body, w.name) for w in body.weights), 0)
    moved: Dim = weights
    for value in [v for _, v in body.outputs] + [i.name for i in body.inputs]:
        moved = moved + body.type_of(value).num_bytes
    for node in body.nodes:
        flops = flops + op_def(node.op).flops(_operands(body, node), node.type, node.attr)
        for index, name in enumerate(node.inputs):
            if root_of(body, name) in body.state:
                moved = moved + _touched(body, node, index)
    return BodyCost(normalise(flops), normalise(moved), normalise(weights))


def _operands(body: Graph, node: Node) -> tuple[TensorType, ...]:
    return tuple(body.type_of(i) for i in node.inputs)


def _touched(body: Graph, node: Node, index: int) -> Dim:
    return op_def(node.op).bytes_of(index, _operands(body, node), node.type, node.attr)


def _weight_bytes(body: Graph, weight: str) -> Dim:
    """A weight is read once, however many nodes use it; of a table, what each of them looks up."""
    users = [body.node[u] for u in body.users[weight]]
    places = [(u, i) for u in users for i, name in enumerate(u.inputs) if name == weight]
    if places and all(i in op_def(u.op).touched for u, i in places):
        return sum((_touched(body, u, i) for u, i in places), 0)
    return body.type_of(weight).num_bytes


def roofline_seconds(flops: float, num_bytes: float, target: Target, threads: int = 1) -> float:
    """Time no kernel beats: operations over the peak rate, or bytes over the bandwidth."""
    return max(flops / (target.peak_flops * threads), num_bytes / target.peak_bandwidth)
