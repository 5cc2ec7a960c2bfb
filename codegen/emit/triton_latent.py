"""Texts of the Triton template of latent attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_attend import Place, epilogue_lines, query_lines
from tilewright.codegen.emit.triton_host import (
    Launch,
    host_text,
    launch_table,
    parameters,
    softmax_parts,
)
from tilewright.codegen.emit.triton_paged import (
    Slice,
    decoded,
    product_type,
    row_cells,
    slices_of,
)
from tilewright.codegen.emit.triton_places import Index
from tilewright.codegen.emit.triton_rows import power_of_two
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson, to_json
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Const

_ENTRIES = {"attend_compressed": "all", "attend_selected": "selected"}


def latent(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the template's variables."""
    body, schedule, chunk = spec.body, spec.schedule.values, spec.numerics.chunk
    (anchor,) = [n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND]
    q, _, positions, request_rows, _, sink = anchor.inputs[:6]
    heads, width = (constant(d) for d in anchor.type.shape[1:])
    states = _states(body, anchor)
    cut = slices_of(width, states, schedule["columns"])
    cast = product_type([body.type_of(q).dtype, *states])
    group, padded = schedule["heads"], power_of_two(width)
    lists, units = _lists(spec, anchor, cut)
    launches, scratch = _launches(spec, anchor, units)
    head, across = Index("head", block=False), "across < %d" % width if padded != width else ""
    places = [_place(s, group, heads) for s in cut]
    tokens = anchor.type.shape[0]
    return {
        "parameters": parameters(spec, launches[0]),
        "split": bool(schedule["split"]),
        "reload": bool(schedule["split"]) or group < 64,
        "heads": heads,
        "group": group,
        "width": width,
        "padded": padded,
        "chunk": chunk,
        "window": int(str(anchor.attr["window"])),
        "halves": [chunk >> i for i in range(1, chunk.bit_length())],
        "slices": cut,
        "lists": lists,
        "num_units": _text(units),
        "positions": positions,
        "request_rows": request_rows,
        "sink": sink,
        "scale": print_scalar(Const(float(str(anchor.attr["scale"]))), {}, "triton"),
        "cast": cast,
        "rounded": spec.numerics.weights == "rounded",
        "precision": ', input_precision="ieee"' if cast == "float32" else "",
        "query": _queries(body, q, anchor, places, cast),
        "epilogue": [epilogue_lines(body, anchor, tokens, place) for place in places],
        "combine_epilogue": epilogue_lines(
            body, anchor, tokens, Place((), (head, Index("across", across)))
        ),
        "launches": launch_table(spec, launches),
        "host": host_text(spec, launches, scratch),
    }


def _states(body: Graph, anchor: Node) -> list[Any]:
    return [body.type_of(i).dtype for i in (anchor.inputs[1], *anchor.inputs[6:7])]


def _place(s: Slice, group: int, heads: int) -> Place:
    """Positions of a program's heads by the columns of a slice."""
    lines = (
        f"head = group * {group} + tl.arange(0, {group})[:, None]",
        f"lane = {s.first} + tl.arange(0, {s.span})[None, :]",
    )
    head = Index("head", f"head < {heads}" if heads % group else "")
    lane = Index("lane", f"lane < {s.first + s.count}" if s.count != s.span else "")
    return Place(lines, (head, lane))


def _queries(
    body: Graph, q: str, anchor: Node, places: Sequence[Place], cast: str
) -> list[list[str]]:
    """Return for each slice the statements that leave its queries, q_0, q_1, .."""
    found = []
    for i, place in enumerate(places):
        made, value = query_lines(body, q, anchor.type.shape[0], place)
        found.append([*made, f"q_{i} = {value}.to(tl.{cast})"])
    return found


def _lists(
    spec: KernelSpec, anchor: Node, cut: Sequence[Slice]
) -> tuple[list[Mapping[str, Any]], DimJson]:
    """Return the lists of entries of a token, and how many units one may have."""
    body, chunk, window = spec.body, spec.numerics.chunk, int(str(anchor.attr["window"]))
    start = -(-window // chunk)
    lists: list[Mapping[str, Any]] = [
        {"kind": "window", "start": 0, **_state(body, anchor, (1, 4), cut)}
    ]
    if len(anchor.inputs) == 6:
        return lists, start
    found = {"kind": _ENTRIES[anchor.op], "start": start, **_state(body, anchor, (6, 7), cut)}
    if found["kind"] == "all":
        state, tables = (body.type_of(i) for i in anchor.inputs[6:8])
        most: DimJson = ["mul", to_json(tables.shape[1]), constant(state.shape[1])]
        found["ratio"] = int(str(anchor.attr["ratio"]))
    else:
        most = listed = constant(body.type_of(anchor.inputs[8]).shape[1])
        padded = power_of_two(listed)
        found |= {"selected": anchor.inputs[8], "listed": listed, "listed_padded": padded}
    return [*lists, found], ["add", start, ["ceildiv", most, chunk]]


def _state(
    body: Graph, anchor: Node, places: tuple[int, int], cut: Sequence[Slice]
) -> dict[str, Any]:
    state, tables = (anchor.inputs[i] for i in places)
    type_ = body.type_of(state)
    width = constant(type_.shape[2])
    return {
        "tables": tables,
        "stride": to_json(body.type_of(tables).shape[1]),
        "per_page": constant(type_.shape[1]),
        "row": row_cells(type_.dtype, width),
        "decoded": decoded(state, "start", "seen", type_.dtype, width, cut),
    }


def _text(units: DimJson) -> str:
    """Print a count of units in the names of the kernel's ints."""
    if not isinstance(units, list):
        return str(units)
    operator = {"add": " + ", "mul": " * "}.get(units[0])
    if operator is None:
        return f"(({_text(units[1])} + {int(str(units[2])) - 1}) // {units[2]})"
    return f"({operator.join(_text(u) for u in units[1:])})"


def _launches(
    spec: KernelSpec, anchor: Node, units: DimJson
) -> tuple[list[Launch], DimJson]:
    schedule, tokens = spec.schedule.values, to_json(anchor.type.shape[0])
    heads, width = (constant(d) for d in anchor.type.shape[1:])
    groups = -(-heads // schedule["heads"])
    options = schedule["warps"], schedule["stages"]
    if not schedule["split"]:
        return [Launch("attend", (tokens, groups, 1), *options)], 0
    work, scratch = softmax_parts(tokens, heads, units, width)
    return [
        Launch("parts", (tokens, groups, units), *options, work),
        Launch("combine", (tokens, heads, 1), max(1, min(4, width // 128)), 2, work),
    ], scratch
