"""Texts of the Triton attention template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.arguments import ancestors
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import (
    Launch,
    host_text,
    launch_table,
    parameters,
    softmax_parts,
)
from tilewright.codegen.emit.triton_places import Index, joined_masks
from tilewright.codegen.emit.triton_rows import power_of_two
from tilewright.codegen.emit.triton_values import Scope, Values, triton_type
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, DimJson, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Const

ROW = Index("row", block=False)
NO_REQUEST = 2147483647
AHEAD = 16  # chunks


@dataclass(frozen=True)
class Place:
    """Elements of attention rows: statements that declare positions, head and column, the row."""

    lines: tuple[str, ...]
    index: tuple[Index, Index]
    row: Index = ROW


def attend(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the template's variables."""
    body, schedule = spec.body, spec.schedule.values
    (anchor,) = [n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND]
    q, k, v, positions, request_rows, tables = anchor.inputs
    _, kv_heads, block_size, width = (_number(d) for d in body.type_of(k).shape)
    heads, tokens = constant(anchor.type.shape[1]), anchor.type.shape[0]
    each = heads // kv_heads
    padded, group = max(16, power_of_two(width)), max(16, power_of_two(each))
    stride = to_json(body.type_of(tables).shape[1])
    cast = triton_type(body.type_of(k).dtype)
    chunks: DimJson = ["ceildiv", ["mul", stride, block_size], spec.numerics.chunk]
    launches, scratch = _launches(spec, tokens, heads, kv_heads, width, chunks)
    tile = schedule["tile"]
    if tile > 1:
        group = max(16, power_of_two(tile * each))
    place = _place(each, group, width, padded, tile)
    query, query_value = query_lines(body, q, tokens, place)
    member = Index("member", block=False)
    lanes = Index("across", f"across < {width}" if padded != width else "")
    return {
        "parameters": parameters(spec, launches[0]),
        "split": bool(schedule["split"]),
        "heads": heads,
        "kv_heads": kv_heads,
        "heads_each": each,
        "tile": tile,
        "span": schedule["span"],
        "ahead": AHEAD,
        "num_tokens": to_json(tokens),
        "no_request": NO_REQUEST,
        "group": group,
        "width": width,
        "padded": padded,
        "block_size": block_size,
        "chunk": spec.numerics.chunk,
        "num_chunks": f"(({stride} * {block_size} + {spec.numerics.chunk - 1}) // "
        f"{spec.numerics.chunk})",
        "positions": positions,
        "request_rows": request_rows,
        "tables": tables,
        "table_stride": stride,
        "k_cache": k,
        "v_cache": v,
        "scale": print_scalar(Const(float(str(anchor.attr["scale"]))), {}, "triton"),
        "cast": cast,
        "precision": ', input_precision="ieee"' if cast == "float32" else "",
        "query": query,
        "query_value": query_value,
        "epilogue": epilogue_lines(body, anchor, tokens, place),
        "combine_epilogue": epilogue_lines(body, anchor, tokens, Place((), (member, lanes))),
        "launches": launch_table(spec, launches),
        "host": host_text(spec, launches, scratch),
    }


def _number(extent: Dim) -> int:
    """Return a constant extent; the count of cache blocks, which is not one, reads as 0."""
    return extent if isinstance(extent, int) else 0


def _launches(
    spec: KernelSpec, tokens: Dim, heads: int, kv_heads: int, width: int, chunks: DimJson
) -> tuple[list[Launch], DimJson]:
    schedule, count = spec.schedule.values, to_json(tokens)
    warps, stages = schedule["warps"], schedule["stages"]
    if not schedule["split"]:
        tile = schedule["tile"]
        tiles: DimJson = ["ceildiv", count, tile] if tile > 1 else count
        return [Launch("attend", (tiles, kv_heads, 1), warps, stages)], 0
    spans: DimJson = ["ceildiv", chunks, schedule["span"]]
    work, scratch = softmax_parts(count, heads, chunks, width)
    return [
        Launch("parts", (count, kv_heads, spans), warps, stages, work),
        Launch("combine", (count, heads, 1), max(1, min(4, width // 32)), 2, work),
    ], scratch


def _place(each: int, group: int, width: int, padded: int, tile: int) -> Place:
    """A kv head's query heads, of one token or of `tile` tokens, by the width of a head."""
    member = "member" if tile == 1 else f"(member % {each})"
    lines = [
        f"member = tl.arange(0, {group})[:, None]",
        f"head = kv_head * {each} + {member}",
        f"lane = tl.arange(0, {padded})[None, :]",
    ]
    lane = Index("lane", f"lane < {width}" if padded != width else "")
    if tile == 1:
        head = Index("head", f"member < {each}" if group != each else "")
        return Place(tuple(lines), (head, lane))
    lines.append("row = token.to(tl.int64)[:, None]")
    return Place(tuple(lines), (Index("head"), lane), Index("row", "real[:, None]"))


def query_lines(body: Graph, q: str, tokens: Dim, place: Place) -> tuple[list[str], str]:
    """Return statements, and the value of the queries at a place."""
    names = ancestors(body, q) if q in body.node else []
    values, scope = Values(body, names, tokens, place.row, {}), Scope(list(place.lines))
    found = values.operand(scope, q, place.index, 3, place.row)
    # Positions past the heads and the width take part in products: they must hold 0.
    masks = joined_masks((place.row, *place.index))
    return scope.lines, f"tl.where({masks}, {found}, 0.0)" if masks and names else found


def epilogue_lines(body: Graph, anchor: Node, tokens: Dim, place: Place) -> list[str]:
    """Elementwise nodes on the values `mixed`, and the stores of what leaves the kernel."""
    before = set(ancestors(body, anchor.name))
    names = [n.name for n in body.nodes if n.name not in before]
    values = Values(body, names, tokens, place.row, {anchor.name: "mixed"})
    scope, (head, lane) = Scope(list(place.lines)), place.index
    heads, width = (constant(d) for d in anchor.type.shape[1:])
    for _, value in body.outputs:
        type_ = body.type_of(value)
        if type_.shape != anchor.type.shape:
            raise LowerError(f"output '{value}': got {type_}, want the shape of {anchor.type}")
        text = values.operand(scope, value, place.index, 3, place.row)
        dtype = triton_type(type_.dtype)
        narrowed = text if dtype == "float32" else f"{text}.to(tl.{dtype})"
        masks = joined_masks((place.row, head, lane))
        at = f"({place.row.text} * {heads} + {head.text}) * {width} + {lane.text}"
        mask = f", mask={masks}" if masks else ""
        scope.lines.append(f"tl.store({value} + {at}, {narrowed}{mask})")
    return scope.lines
