"""Deriving `Numerics`: the only place that constructs one. What it sees are reduced extents,
element types and the target, never a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.codegen.sections import sections_of
from tilewright.codegen.spec import Numerics
from tilewright.codegen.target import Target
from tilewright.graph import Graph, Node, Role
from tilewright.graph.dims import Dim, product, roles_of
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat, ElementType

CODE_ATOMS = ("wgmma_e4m3", "mx", "integer")
CODE_GROUP = 32  # values of k that the smallest scale of codes is for
SPAN = 128  # values of k whose scales one word holds
SEGMENT_UNIT = 256  # segments start at multiples of what one step of any schedule takes of k


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
            plain = any(n.op == "attend" for n in body.nodes)
            lanes, chunk = target.lanes if plain else 1, target.attend_chunk
            if target.latent_chunk is not None and not plain:
                chunk = target.latent_chunk
            found = Numerics(atom=target.atom, chunk=chunk, lanes=lanes, combine="in_order")
            return found if plain else replace(found, weights=_latent_weights(body, target))
        case "row" | "select":
            if context_bound:
                raise LowerError(
                    f"{kind} kernel '{body.name}': reduces a context extent: want a chunk"
                )
            return Numerics(lanes=target.lanes, combine="tree")
        case _:
            raise LowerError(f"kernel kind '{kind}': unknown: have contract, attend, select, row")


def _latent_weights(body: Graph, target: Target) -> str:
    """The released models round weights before they meet rows that are packed."""
    packed = all(isinstance(s.type.dtype, BlockFormat) for s in body.states)
    return target.latent_weights if packed else "whole"


def alternatives(kind: str, body: Graph, target: Target) -> tuple[Numerics, ...]:
    """Return the numerics `fast` mode may choose from per bucket; the first is the derived one."""
    first = derive(kind, body, target)
    found = [first]
    if kind == "contract" and first.scale_order != "none" and first.atom == "fma":
        for order in ("dequantise", "factored")[: 1 + (len(_formats(body)) == 1)]:
            found.append(replace(first, scale_order=order))
    if first.atom in CODE_ATOMS:
        found.append(replace(first, atom=target.atom, chunk=0, scale_order=target.scale_order))
    if kind == "contract" and first.segments > 1:
        found.append(replace(first, segments=1))
    if kind == "attend" and first.chunk == target.attend_chunk:
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
        # A pooled window is as many rows as its attributes say.
        if op_def(node.op).kind not in (Kind.ATTEND, Kind.GATHER)
    ] + (_attend_extents(body, node) if op_def(node.op).kind is Kind.ATTEND else [])


def _attend_extents(body: Graph, node: Node) -> list[Dim]:
    tables = (5,) if node.op == "attend" else (4, 7)[: 1 if len(node.inputs) == 6 else 2]
    return [body.type_of(node.inputs[i]).shape[1] for i in tables]


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
    """Scales of float codes are powers of two: applied to the sum of a group they cost accuracy
    nothing. One launch has one order, and sums of groups need one format."""
    formats = _formats(body)
    grouped = [f for f in formats if isinstance(f, BlockFormat)]
    order = target.scale_order
    # A matrix instruction takes scaled codes as they are, exact in bf16.
    if target.atom == "fma" and len(formats) == 1 and all(f.code.is_float for f in grouped):
        order = "factored"
    if _codes_are_multiplied(body, target):
        return Numerics(
            atom=target.code_atom,
            chunk={"mx": 0, "integer": CODE_GROUP}.get(target.code_atom, SPAN),
            lanes=target.lanes,
            segments=_segments(body, target),
            scale_order="factored",
        )
    return Numerics(
        atom=target.atom,
        lanes=target.lanes,
        segments=_segments(body, target),
        scale_order=order if grouped else "none",
    )


def _block_formats(body: Graph) -> list[BlockFormat]:
    """Quantised formats of the operands of all products."""
    anchors = [n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT]
    types = [body.type_of(i).dtype for n in anchors for i in n.inputs[:2]]
    return [t for t in types if isinstance(t, BlockFormat)]


def _codes_are_multiplied(body: Graph, target: Target) -> bool:
    """Say whether codes meet the matrix unit as they are. Where sums of 32 would leave it, and in
    experts, the values that codes stand for are multiplied: bf16 holds them, and sums stay in the
    unit. (Two schedules of experts of codes differed in bits on an H200.) In integers only products
    with e2m1 are quick."""
    if target.code_atom == "integer":
        return _codes_meet_codes(body) and all(
            t.code.name == "fp4_e2m1" for t in _formats(body) if isinstance(t, BlockFormat)
        )
    values = target.code_atom == "wgmma_e4m3" and (
        any(d.block[1] % SPAN for d in _block_formats(body))
        or any(n.op == "expert_linear" for n in body.nodes)
    )
    return bool(target.code_atom) and _codes_meet_codes(body) and not values


def _codes_meet_codes(body: Graph) -> bool:
    """Say whether every product is of fp8 rows with matrices of one float format, and all scales
    are powers of two of whole groups: then codes are multiplied as they are."""
    anchors = [n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT]
    types = [[body.type_of(n.inputs[i]).dtype for n in anchors] for i in (0, 1)]
    rows, matrices = ([t for t in found if isinstance(t, BlockFormat)] for found in types)
    found = _block_formats(body)
    return (
        len(found) == 2 * len(anchors)
        and all(t.scale.name == "ue8m0" and not t.tail for t in found)
        and all(t.code.is_float and t.block[1] % CODE_GROUP == 0 for t in found)
        and all(t.name == "fp8_e4m3" and t.block[0] == 1 for t in rows)
        and len({t.code for t in matrices}) == 1
    )


def segment_length(k: int, segments: int) -> int:
    """Return the values of k in each segment but the last, which may have fewer."""
    return -(-k // (segments * SEGMENT_UNIT)) * SEGMENT_UNIT


def _segments(body: Graph, target: Target) -> int:
    """Parts of K for as many sums as fill the chip when there is one row: a power of two, each of
    at least two units, or one of fp32 products. Short sums are not worth the kernel that adds
    their parts. Experts have sums of every slot; those of codes, whose groups are added one after
    the other, are cut all the same."""
    anchors = [n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT]
    coded = bool(target.code_atom) and _codes_meet_codes(body)
    if anchors[0].op == "expert_linear" and not _codes_are_multiplied(body, target):
        return 1
    k = int(body.type_of(anchors[0].inputs[0]).shape[-1])
    columns = 0  # of products of values that meet in registers, those of one count
    for nodes in sections_of(body, anchors):
        first = next(n for n in nodes if op_def(n.op).kind is Kind.CONTRACT)
        met = sum(op_def(n.op).kind is Kind.CONTRACT for n in nodes)
        columns += int(product(first.type.shape[1:])) * (met if coded else 1)
    # Products in fp32 are taken by the plain cores: a unit of them is worth a program.
    plain = any(body.type_of(i).dtype.name in ("f32", "f16") for n in anchors for i in n.inputs[:2])
    full = target.full_columns
    if coded:
        full = target.full_code_columns * (2 if anchors[0].op == "expert_linear" else 1)
        # Two products that take turns leave no registers for sums of segments.
        if target.code_atom == "wgmma_e4m3" and _codes_are_multiplied(body, target):
            full = target.full_value_columns
    elif all(t.name == "bf16" for t in _formats(body)) and not plain:
        full = target.full_value_columns or full
    segments = 1
    while columns * segments * 2 <= full:
        if k < (segments * 2 if plain else max(segments * 4, 8)) * SEGMENT_UNIT:
            break
        segments *= 2
    return segments


def _formats(body: Graph) -> set[ElementType]:
    return {
        body.type_of(n.inputs[1]).dtype for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT
    }
