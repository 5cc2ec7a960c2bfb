"""Deriving `Numerics`: the only place that constructs one. What it sees are reduced extents,
element types and the target, never a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.codegen.spec import Numerics
from tilewright.codegen.target import Target
from tilewright.graph import Graph, Node, Role
from tilewright.graph.dims import Dim, roles_of
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat


def derive(kind: str, body: Graph, target: Target) -> Numerics:
    """Return the numerics every variant of this body shares: all buckets, prefill and decode.

    Raises LowerError where a reduction runs over an extent the batch decides.
    """
    extents = [e for node in body.nodes for e in reduced_extents(body, node)]
    context_bound = any(checked_roles(body, extent) for extent in extents)
    match kind:
        case "contract":
            return _contract(body, target)
        case "attend":
            return Numerics(
                atom=target.atom,
                chunk=target.attend_chunk,
                lanes=target.lanes,
                combine="in_order",
            )
        case "row":
            if context_bound:
                raise LowerError(
                    f"row kernel '{body.name}': reduces a context extent: want a chunk"
                )
            return Numerics(lanes=target.lanes, combine="tree")
        case _:
            raise LowerError(f"kernel kind '{kind}': unknown: have contract, attend, row")


def alternatives(kind: str, body: Graph, target: Target) -> tuple[Numerics, ...]:
    """Return the numerics `fast` mode may choose from per bucket; the first is the derived one."""
    first = derive(kind, body, target)
    found = [first]
    if kind == "contract" and first.scale_order != "none":
        for order in ("dequantise", "factored"):
            found.append(replace(first, scale_order=order))
    if kind == "attend":
        found += [replace(first, chunk=c) for c in target.attend_chunks]
    return tuple(dict.fromkeys(found))


def reduced_extents(body: Graph, node: Node) -> Sequence[Dim]:
    """Return the extents a node sums over."""
    axes = op_def(node.op).reduced_axes
    return [
        body.type_of(name).shape[axis]
        for name, operand_axes in zip(node.inputs, axes, strict=False)
        for axis in operand_axes
        # A paged cache is walked along one request's positions, by its block table: its extent
        # of blocks is storage, and what is reduced is the request's own context.
        if op_def(node.op).kind is not Kind.ATTEND
    ] + (_attend_extents(body, node) if op_def(node.op).kind is Kind.ATTEND else [])


def _attend_extents(body: Graph, node: Node) -> list[Dim]:
    tables = body.type_of(node.inputs[5])
    return [tables.shape[1]]


def checked_roles(body: Graph, extent: Dim) -> bool:
    """Say whether a reduced extent is a context one; raise LowerError for a batch one."""
    roles = roles_of(extent, body.dim)
    if Role.BATCH in roles:
        raise LowerError(
            f"numerics of '{body.name}': a reduction runs over '{extent}', which the other "
            "requests of the batch decide: want a constant or a context extent"
        )
    return Role.CONTEXT in roles


def _contract(body: Graph, target: Target) -> Numerics:
    formats = {
        body.type_of(n.inputs[1]).dtype for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT
    }
    grouped = any(isinstance(f, BlockFormat) for f in formats)
    return Numerics(
        atom=target.atom,
        lanes=target.lanes,
        segments=1,
        scale_order=target.scale_order if grouped else "none",
    )
