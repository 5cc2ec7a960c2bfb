"""Texts of the Triton contraction template, and the memory that a contraction works in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewright.codegen.arguments import ancestors
from tilewright.codegen.body import root_of
from tilewright.codegen.emit.cuda_scaled import SCALED, scaled_launch, scaled_source
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.tilelang import tile_launch, tile_source
from tilewright.codegen.emit.triton_coded import CodedRows
from tilewright.codegen.emit.triton_decoded import (
    STEP,
    decode_launch,
    decoded_part,
    number_blocks,
)
from tilewright.codegen.emit.triton_hopper import hopper_launch, hopper_source
from tilewright.codegen.emit.triton_host import (
    Launch,
    Pointer,
    host_text,
    launch_table,
    parameters,
    workspace_pointers,
)
from tilewright.codegen.emit.triton_route import (
    num_blocks,
    num_slots,
    result_rows,
    route_launches,
    route_parts,
    route_texts,
    stacked,
)
from tilewright.codegen.emit.triton_rows import RowPrinter
from tilewright.codegen.emit.triton_stream import stream_launch, stream_texts, tiles_launch
from tilewright.codegen.emit.triton_values import Index, Scope, Values, triton_type
from tilewright.codegen.emit.triton_weights import matrix_strides
from tilewright.codegen.numerics import CODE_ATOMS, segment_length
from tilewright.codegen.pack_gpu import ROWS, block_layout
from tilewright.codegen.pack_tiles import TILE_BITS, TILE_ROWS, lies_in_parts, row_bytes, spans
from tilewright.codegen.sections import sections_of
from tilewright.codegen.spec import KernelSpec, Numerics, Schedule
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson, to_json
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat, ElementType

IEEE = ', input_precision="ieee"'
COMBINED = 256  # columns that one program of the second kernel adds


def contractions(body: Graph) -> list[Node]:
    """Return the contractions of a body; they share their activation."""
    return [n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT]


def contract(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the template's variables."""
    body, schedule, anchors = spec.body, spec.schedule.values, contractions(spec.body)
    value, rows = anchors[0].inputs[0], anchors[0].type.shape[0]
    computed, scaled = value in body.node, schedule.get("stream") == SCALED
    work, scratch = workspace_pointers(workspace_parts(body, spec.numerics, spec.schedule))
    work = _with_bytes(work)
    sections, blocks = _sections(spec, anchors)
    split = _split(spec, anchors) if schedule["split"] else None
    launches = _launches(spec, anchors, blocks, sections, work)
    prologue: list[str] = []
    coded = _coded(spec, anchors)
    k, cast = constant(body.type_of(value).shape[-1]), operand_type(body, anchors)
    if schedule.get("decoded"):
        launches.insert(0, decode_launch(number_blocks(sections), k, work))
    if computed:
        sinks = {root_of(body, value): "activation"}
        printer = RowPrinter(
            body, ancestors(body, value), rows, sinks, spec.numerics.lanes,
            coded=None if coded is None else coded["rows"],
        )  # fmt: skip
        grid = (to_json(rows), printer.programs, 1)
        launches.insert(0, Launch("prologue", grid, schedule["row_warps"], 2, work))
        prologue = printer.text()
    elif coded is not None:
        grid = (_source_rows(body, anchors[0]), -(-coded["k"] // 1024), 1)
        launches.insert(0, Launch("encode", grid, schedule["row_warps"], 2, work))
    in_cuda = scaled_source if scaled else hopper_source if schedule.get("hopper") else None
    streamed = schedule.get("stream") and not scaled
    return {
        "coded": coded,
        "stream": stream_texts(spec, anchors, sections) if streamed else None,
        "hopper": in_cuda(spec, anchors, work) if in_cuda else None,
        "tilelang": tile_source(spec, anchors) if schedule.get("tilelang") else None,
        "parameters": parameters(spec, launches[-1]),
        "prologue_parameters": parameters(spec, launches[0]),
        "prologue": prologue,
        "k": k,
        "num_rows": to_json(rows),
        "slots": num_slots(anchors[0]),
        "route": route_texts(body, anchors[0], schedule),
        "activation": "activation" if computed else value,
        "cast": cast,
        "precision": IEEE if cast == "float32" else "",
        "bm": schedule["bm"],
        "bn": schedule["bn"],
        "bk": schedule["bk"],
        "segments": spec.numerics.segments,
        "segment": segment_length(k, spec.numerics.segments),
        "split": split,
        "decoded": STEP if schedule.get("decoded") else 0,
        "sections": sections,
        "tiles": any(w["form"] == "tiles" for s in sections for w in s["walks"]),
        "words": any(w["form"] in ("nibbles", "bytes") for s in sections for w in s["walks"]),
        "launches": launch_table(spec, launches),
        "host": host_text(spec, launches, scratch),
    }


def _coded(spec: KernelSpec, anchors: list[Node]) -> Mapping[str, Any] | None:
    """How rows of activation codes lie, where products are of codes: None where they are not."""
    if spec.numerics.atom not in CODE_ATOMS:
        return None
    body, value = spec.body, anchors[0].inputs[0]
    type_, weight = body.type_of(value), body.type_of(anchors[0].inputs[1])
    assert isinstance(type_.dtype, BlockFormat) and isinstance(weight.dtype, BlockFormat)
    k = constant(type_.shape[-1])
    # Rows lie as what they meet does: nibbles of a part, bytes of a part, or in the order of k.
    order = 1 if lies_in_parts(weight.dtype.name, weight.dtype.block) else 0
    if spec.numerics.atom == "mx" and TILE_BITS[weight.dtype.name] == 4:
        order = 2
    num_rows = _text(_source_rows(body, anchors[0]))
    rows = CodedRows("codes", "code_bytes", k, num_rows, order=order)
    return {
        "atom": spec.numerics.atom,
        "k": k,
        "spans": spans(k),
        "num_rows": num_rows,
        "group": type_.dtype.block[1],
        "order": order,
        "rows": rows,
    }


def _source_rows(body: Graph, anchor: Node) -> DimJson:
    """Return the rows of the activation: of tokens, or of each of their slots."""
    tokens, *outer = body.type_of(anchor.inputs[0]).shape[:-1]
    return ["mul", to_json(tokens), constant(outer[0])] if outer else to_json(tokens)


def _with_bytes(work: tuple[Pointer, ...]) -> tuple[Pointer, ...]:
    """Scales of codes are written as bytes and read as words."""
    aliases = [replace(p, name="code_bytes", dtype="u8") for p in work if p.name == "code_scales"]
    return (*work, *aliases)


def workspace_parts(
    body: Graph, numerics: Numerics, schedule: Schedule
) -> Mapping[str, tuple[str, DimJson]]:
    """Return the buffers of a contraction: Triton type of the elements, and bytes."""
    anchors = contractions(body)
    parts: dict[str, tuple[str, DimJson]] = {}
    value, type_ = anchors[0].inputs[0], body.type_of(anchors[0].inputs[0])
    if numerics.atom in CODE_ATOMS:
        rows, width = _source_rows(body, anchors[0]), constant(type_.shape[-1])
        parts["codes"] = ("fp8e4nv", ["mul", rows, width])
        parts["code_scales"] = ("i32", ["mul", rows, spans(width) * 4])
    elif value in body.node:
        dtype, width = _memory_type(type_.dtype), constant(type_.shape[-1])
        size = {"float32": 4}.get(dtype, 2)
        rows = to_json(anchors[0].type.shape[0])
        parts["activation"] = (_SHORT[dtype], ["mul", rows, width * size])
    parts.update(route_parts(body, anchors[0], schedule.values))
    if schedule.values.get("decoded"):
        parts["whole"] = decoded_part(body, anchors, schedule)
    if schedule.values["split"]:
        columns = sum(constant(a.type.shape[-1]) for a in anchors)
        parts["parts"] = ("fp32", ["mul", result_rows(anchors[0]), columns * numerics.segments * 4])
    return parts


def _memory_type(dtype: ElementType) -> str:
    """Quantised values lie as bf16, which holds them exactly."""
    return "bfloat16" if isinstance(dtype, BlockFormat) else triton_type(dtype)


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def operand_type(body: Graph, anchors: list[Node]) -> str:
    """Return the type in which products are taken without loss: bf16 codes and values, or fp32."""
    types = [body.type_of(i).dtype for a in anchors for i in a.inputs[:2]]
    exact = all(isinstance(t, BlockFormat) or t.name == "bf16" for t in types)
    return "bfloat16" if exact else "float32"


def _launches(
    spec: KernelSpec,
    anchors: list[Node],
    blocks: int,
    sections: Sequence[Mapping[str, Any]],
    work: tuple[Pointer, ...],
) -> list[Launch]:
    """Kernels after the prologue, in order."""
    schedule = spec.schedule.values
    first = anchors[0]
    one = _one_launch(spec, anchors, work)
    if one is not None:
        found = [one]
        if schedule["split"]:
            columns = sections[-1]["combine_stop"]
            found.append(Launch("combine", (result_rows(first), columns, 1), 2, 2, work))
        return found
    launches = route_launches(spec.body, first, schedule, work)
    split = bool(schedule["split"])
    row_blocks: DimJson = ["ceildiv", to_json(first.type.shape[0]), schedule["bm"]]
    if stacked(first):
        row_blocks = num_blocks(spec.body, first, schedule)
    launches.append(
        Launch(
            "contract",
            (
                row_blocks,
                blocks,
                spec.numerics.segments if split else 1,
            ),
            schedule["warps"],
            schedule["stages"],
            work,
        )
    )
    if split:
        columns = sections[-1]["combine_stop"]
        launches.append(Launch("combine", (result_rows(first), columns, 1), 2, 2, work))
    return launches


def _one_launch(
    spec: KernelSpec, anchors: list[Node], work: tuple[Pointer, ...]
) -> Launch | None:
    """The launch of a kernel that brings its tiles itself, in whatever language."""
    schedule, value = spec.schedule.values, anchors[0].inputs[0]
    made = [p for p in work if p.name == "activation"] or [Pointer(value, value, "bf16")]
    if schedule.get("tilelang"):
        return tile_launch(spec, anchors, made[0], work)
    if schedule.get("hopper"):
        return hopper_launch(spec, anchors, work)
    if not schedule.get("stream"):
        return None
    if spec.numerics.atom in CODE_ATOMS:
        launch = scaled_launch if schedule["stream"] == SCALED else stream_launch
        return launch(spec, anchors, work)
    return tiles_launch(spec, anchors, made[0], work)


def _split(spec: KernelSpec, anchors: list[Node]) -> Mapping[str, Any]:
    return {
        "columns": COMBINED,
        "num_rows": _text(result_rows(anchors[0])),
        "width": sum(constant(a.type.shape[-1]) for a in anchors),
    }


def _text(tree: DimJson) -> str:
    """Print a count of rows: an int of the kernel, or its product with a constant."""
    return f"({tree[1]} * {tree[2]})" if isinstance(tree, list) else str(tree)


def _sections(spec: KernelSpec, anchors: list[Node]) -> tuple[list[Mapping[str, Any]], int]:
    """Return the sections, each a range of blocks along the columns, and how many blocks."""
    bn, start, column, combine_start = spec.schedule.values["bn"], 0, 0, 0
    found: list[Mapping[str, Any]] = []
    for nodes in sections_of(spec.body, anchors):
        mine = [n for n in nodes if op_def(n.op).kind is Kind.CONTRACT]
        n = constant(mine[0].type.shape[-1])
        each = -(-n // bn)
        grouped = mine[0].op == "grouped_linear"
        stop = start + each * (num_slots(mine[0]) if grouped else 1)
        combine_stop = combine_start + -(-n // COMBINED)
        columns = [column + n * i for i in range(len(mine))]
        found.append(
            {
                "n": n,
                "groups": each if grouped else 0,
                "start": start,
                "stop": stop,
                "ragged": n % bn != 0,
                "walks": _walks(spec, mine, n, grouped),
                "anchors": [
                    {"acc": f"acc_{a.name}", "column": at}
                    for a, at in zip(mine, columns, strict=True)
                ],
                "epilogue": _epilogue(spec, nodes, mine, n, ragged=n % bn != 0),
                "combined": _epilogue(spec, nodes, mine, n, ragged=True),
                "combine_start": combine_start,
                "combine_stop": combine_stop,
            }
        )
        start, combine_start, column = stop, combine_stop, column + n * len(mine)
    return found, start


def _walks(spec: KernelSpec, anchors: list[Node], n: int, grouped: bool) -> list[Mapping[str, Any]]:
    """Weights of one format are walked together."""
    found: dict[str, dict[str, Any]] = {}
    bn = spec.schedule.values["bn"]
    # Columns past the last panel are not there; those of a group run on into the next group.
    tall = TILE_ROWS if _tiled(spec, anchors) else ROWS
    limit = n if grouped else -(-n // tall) * tall
    for anchor in anchors:
        type_ = spec.body.type_of(anchor.inputs[1])
        walk = found.get(str(type_.dtype))
        if walk is None:
            walk = {"weights": [], "limit": limit if limit % bn else 0}
            walk |= _form(spec, anchor, walk["limit"])
            found[str(type_.dtype)] = walk
        walk["weights"].append({"acc": f"acc_{anchor.name}", "pointers": _pointers(spec, anchor)})
    return list(found.values())


def _form(spec: KernelSpec, anchor: Node, limit: int) -> Mapping[str, Any]:
    """Return what the template needs to know of a format."""
    type_ = spec.body.type_of(anchor.inputs[1])
    k = constant(type_.shape[-1])
    if not isinstance(type_.dtype, BlockFormat):
        return {"form": "plain"}
    name = type_.dtype.name
    if name in TILE_BITS:
        fine = spec.numerics.atom == "mx" or TILE_BITS[name] == 8
        return {
            "form": "tiles",
            "bits": TILE_BITS[name],
            "row_bytes": row_bytes(name),
            "parts": lies_in_parts(name, type_.dtype.block),
            "spans": spans(k),
            "up": 1.0 if fine else 64.0,
        }
    blocks = block_layout(name)
    return {
        "form": "nibbles" if blocks.code_bytes * 2 == blocks.group else "bytes",
        "group": blocks.group,
        "code_bytes": blocks.code_bytes,
    }


def _tiled(spec: KernelSpec, anchors: list[Node]) -> bool:
    return any(spec.body.type_of(a.inputs[1]).dtype.name in TILE_BITS for a in anchors)


def _pointers(spec: KernelSpec, anchor: Node) -> list[Mapping[str, Any]]:
    """A weight's pointers: as given, where they point for one matrix, and elements of a matrix."""
    weight = anchor.inputs[1]
    type_ = spec.body.type_of(weight)
    if isinstance(type_.dtype, BlockFormat):
        strides = matrix_strides(weight, type_)
    else:
        strides = [(weight, constant(type_.shape[-1]) * constant(type_.shape[-2]))]
    return [
        {"name": name, "at": f"{name}_at" if stacked(anchor) else name, "stride": stride}
        for name, stride in strides
    ]


def _epilogue(
    spec: KernelSpec, nodes: list[Node], anchors: list[Node], n: int, *, ragged: bool
) -> list[str]:
    """Elementwise nodes on the sums, and the stores of what leaves the kernel."""
    body, scope = spec.body, Scope()
    rows, slots = anchors[0].type.shape[0], num_slots(anchors[0])
    known = {a.name: f"acc_{a.name}" for a in anchors}
    row = Index("row", "here")
    index: tuple[Index, ...] = (Index("col", f"col < {n}" if ragged else ""),)
    if slots:
        row, index = Index(f"(row // {slots})", "here"), (Index(f"(row % {slots})", "here"), *index)
    values = Values(body, [m.name for m in nodes if m.name not in known], rows, row, known)
    for node in nodes:
        if node.name not in {value for _, value in body.outputs}:
            continue
        text = values.operand(scope, node.name, index, len(index) + 1, row)
        dtype = triton_type(node.type.dtype)
        narrowed = text if dtype == "float32" else f"{text}.to(tl.{dtype})"
        mask = f"here & (col < {n})" if ragged else "here"
        scope.lines.append(f"tl.store({node.name} + row * {n} + col, {narrowed}, mask={mask})")
    return scope.lines
