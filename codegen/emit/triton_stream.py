"""Contractions as streams of tiles: launches with their descriptors, and the texts of the kernel
over fp8 codes, whose functions are in templates/triton/tw_stream.triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import Descriptor, Launch, Pointer
from tilewright.codegen.numerics import CODE_ATOMS, segment_length
from tilewright.codegen.pack_tiles import SPAN, TILE_ROWS, spans
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Node
from tilewright.graph.dims import DimJson, to_json

FEW = 2  # the value of `stream` where a block has few rows and 64 columns
NEIGHBOURS = 8  # blocks of rows that share columns before the next columns come


def stream_launch(spec: KernelSpec, anchors: list[Node], work: tuple[Pointer, ...]) -> Launch:
    """Return the launch of the streaming kernel: one program a core, each for several tiles."""
    schedule = spec.schedule.values
    rows, k = to_json(anchors[0].type.shape[0]), _row_length(spec, anchors)
    codes = next(p for p in work if p.name == "codes")
    box = schedule["bm"], SPAN
    found = [Descriptor("row_tiles", "workspace", "fp8e4nv", codes.offset, rows, k, box)]
    for i, anchor in enumerate(anchors):
        panels = -(-_columns(anchor) // TILE_ROWS)
        found.append(
            Descriptor(
                f"tiles{i}", anchor.inputs[1], "fp8e4nv", 0, panels * spans(k) * TILE_ROWS, SPAN,
                (TILE_ROWS, SPAN),
            )
        )  # fmt: skip
    row_blocks: DimJson = ["ceildiv", rows, schedule["bm"]]
    if schedule["stream"] == FEW:
        segments = spec.numerics.segments if schedule["split"] else 1
        blocks = row_blocks, _blocks(spec, anchors), segments
        most = 64 if schedule["bm"] <= 16 else 96
        return Launch("contract", blocks, 4, 2, work, tuple(found), most)
    tiles: DimJson = ["mul", row_blocks, _blocks(spec, anchors)]
    if schedule["split"]:
        tiles = ["mul", tiles, spec.numerics.segments]
    grid: tuple[DimJson, DimJson, DimJson] = (["min", tiles, schedule["cores"]], 1, 1)
    return Launch("contract", grid, 4, 2, work, tuple(found))


def tiles_launch(
    spec: KernelSpec, anchors: list[Node], activation: Pointer, work: tuple[Pointer, ...]
) -> Launch:
    """Return the launch of plain values by tiles of both operands, one program a core."""
    schedule = spec.schedule.values
    rows, k, n = to_json(anchors[0].type.shape[0]), _row_length(spec, anchors), _columns(anchors[0])
    bm, bn, bk = (schedule[name] for name in ("bm", "bn", "bk"))
    tensor, offset = activation.tensor, activation.offset
    found = [Descriptor("row_tiles", tensor, "bf16", offset, rows, k, (bm, bk))]
    found += [
        Descriptor(f"tiles{i}", a.inputs[1], "bf16", 0, n, k, (bn, bk))
        for i, a in enumerate(anchors)
    ]
    tiles: DimJson = ["mul", ["ceildiv", rows, bm], -(-n // bn)]
    grid: tuple[DimJson, DimJson, DimJson] = (["min", tiles, schedule["cores"]], 1, 1)
    return Launch("contract", grid, schedule["warps"], schedule["stages"], work, tuple(found))


def stream_texts(
    spec: KernelSpec, anchors: list[Node], sections: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the template's `stream`: blocks of columns by weight, segments and stages."""
    schedule, k = spec.schedule.values, _row_length(spec, anchors)
    segments = spec.numerics.segments
    beside = segments if schedule["split"] else 1
    lines: dict[str, Any] = {}
    part: dict[str, int] = {}
    for section in sections:
        for anchor in section["anchors"]:
            lines[anchor["acc"]] = section["epilogue"]
            part[anchor["acc"]] = anchor["column"]
    start, columns = 0, []
    for i, anchor in enumerate(anchors):
        n, acc = _columns(anchor), f"acc_{anchor.name}"
        stop = start + -(-n // schedule["bn"])
        columns.append(
            {
                "tiles": f"tiles{i}", "scales": f"{anchor.inputs[1]}_d", "n": n, "start": start,
                "stop": stop, "acc": acc, "part": part[acc], "epilogue": lines[acc],
            }
        )  # fmt: skip
        start = stop
    return {
        "coded": spec.numerics.atom in CODE_ATOMS,
        "few": schedule["stream"] == FEW,
        "names": ", ".join(["row_tiles", *(c["tiles"] for c in columns)]),
        "columns": columns,
        "blocks": start,
        "beside": beside,
        "segment_spans": segment_length(k, segments) // SPAN if segments > 1 else spans(k),
        "neighbours": NEIGHBOURS,
        "stages": schedule["stages"],
    }


def _columns(anchor: Node) -> int:
    return constant(anchor.type.shape[-1])


def _blocks(spec: KernelSpec, anchors: list[Node]) -> int:
    return sum(-(-_columns(a) // spec.schedule.values["bn"]) for a in anchors)


def _row_length(spec: KernelSpec, anchors: list[Node]) -> int:
    return constant(spec.body.type_of(anchors[0].inputs[0]).shape[-1])
