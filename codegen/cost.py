"""Symbolic cost of a fused body: operations, bytes moved, and the roofline time they imply."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.target import Target
from tilewright.graph import Graph
from tilewright.graph.dims import Dim, normalise
from tilewright.graph.ops import Kind, op_def


@dataclass(frozen=True)
class BodyCost:
    """`flops` of all nodes, and the bytes of operands and results that cross the kernel's
    border."""

    flops: Dim
    num_bytes: Dim


def body_cost(body: Graph) -> BodyCost:
    """Return the cost of one launch. States count only what a step reads or writes of them."""
    flops: Dim = 0
    for node in body.nodes:
        operands = [body.type_of(i) for i in node.inputs]
        flops = flops + op_def(node.op).cost(operands, node.type, node.attr).flops
    moved: Dim = 0
    for value in [v for _, v in body.outputs] + [i.name for i in body.inputs]:
        moved = moved + body.type_of(value).num_bytes
    moved = moved + _weight_bytes(body) + _state_bytes(body)
    return BodyCost(normalise(flops), normalise(moved))


def _weight_bytes(body: Graph) -> Dim:
    """Weights are read once; a table only in the rows looked up."""
    total: Dim = 0
    for weight in body.weights:
        users = [body.node[u] for u in body.users[weight.name]]
        if users and all(u.op == "embedding" for u in users):
            rows = users[0].type.shape[0]
            total = total + rows * weight.type.with_shape(1, weight.type.shape[1]).num_bytes
        else:
            total = total + weight.type.num_bytes
    return total


def _state_bytes(body: Graph) -> Dim:
    """Stores write the step's rows; attention reads each request's blocks."""
    total: Dim = 0
    for node in body.nodes:
        if op_def(node.op).kind is Kind.STORE:
            total = total + body.type_of(node.inputs[1]).num_bytes
        if op_def(node.op).kind is Kind.ATTEND:
            tables, cache = body.type_of(node.inputs[5]), body.type_of(node.inputs[1])
            total = total + 2 * cache.with_shape(*tables.shape, *cache.shape[1:]).num_bytes
    return total


def roofline_seconds(flops: float, num_bytes: float, target: Target, threads: int = 1) -> float:
    """Time no kernel beats: operations over the peak rate, or bytes over the bandwidth."""
    return max(flops / (target.peak_flops * threads), num_bytes / target.peak_bandwidth)
