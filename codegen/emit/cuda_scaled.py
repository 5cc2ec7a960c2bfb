"""Products of fp8 codes with a scale for 128 values of k, many rows, on Hopper's cores: the one
kernel of a source that is written in CUDA, between Triton's that code rows and add segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cuda_latent import parameters
from tilewright.codegen.emit.cuda_sums import REGISTERS, epilogue, refuses_epilogue
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import Descriptor, Launch, Pointer
from tilewright.codegen.numerics import segment_length
from tilewright.codegen.pack_tiles import SPAN, TILE_ROWS, spans
from tilewright.codegen.sections import sections_of
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec, Numerics
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson, to_json
from tilewright.graph.types import BlockFormat

SCALED = 3  # the value of `stream` in a schedule
ROWS, HALF = 128, 128  # of a block; columns of each of its two halves
THREADS = 384
_STAGE_BYTES = (ROWS + 2 * HALF) * SPAN
_KEPT_BYTES = ROWS * (HALF * 4 + 16)  # rows of results on their way out
_TYPES = {"f32": "float", "bf16": "unsigned short"}


def refuses_scaled(body: Graph, numerics: Numerics, anchors: Sequence[Node]) -> str | None:
    """Say why a contraction has no kernel here, or return None."""
    if numerics.atom != "wgmma_e4m3" or any(a.op != "linear" for a in anchors):
        return "products are of other operands"
    for anchor in anchors:
        type_ = body.type_of(anchor.inputs[1]).dtype
        if not isinstance(type_, BlockFormat) or type_.block[0] % HALF or type_.block[1] != SPAN:
            return f"weights are {type_}, want a scale for {HALF} x {SPAN}"
        if constant(anchor.type.shape[-1]) % 8:
            return "columns do not come in parts of 16 bytes"
    if constant(body.type_of(anchors[0].inputs[0]).shape[-1]) % SPAN:
        return f"rows are no multiple of {SPAN}"
    for nodes in sections_of(body, list(anchors)):
        if refusal := refuses_epilogue(body, nodes):
            return refusal
    return None


def sums_meet(body: Graph, anchors: Sequence[Node]) -> bool:
    """Say whether a block can hold all sums that meet in an epilogue: those of one weight, or of
    two of one size."""
    for nodes in sections_of(body, list(anchors)):
        mine = [a for a in anchors if a in nodes]
        if len(mine) > 2 or len({constant(a.type.shape[-1]) for a in mine}) > 1:
            return False
    return True


def shared_bytes(schedule: Mapping[str, int]) -> int:
    """Return the shared memory of a block: stages, their barriers, results on their way out."""
    return schedule["stages"] * (_STAGE_BYTES + 16) + _KEPT_BYTES


def scaled_launch(spec: KernelSpec, anchors: Sequence[Node], work: tuple[Pointer, ...]) -> Launch:
    """Return the launch: a block for each core takes tile after tile."""
    schedule = spec.schedule.values
    rows: DimJson = ["ceildiv", to_json(anchors[0].type.shape[0]), ROWS]
    beside = spec.numerics.segments if schedule["split"] else 1
    tiles: DimJson = ["mul", rows, _units(spec, anchors)[-1]["stop"] * beside]
    grid: tuple[DimJson, DimJson, DimJson] = (["min", tiles, schedule["cores"]], 1, 1)
    return Launch(
        "contract", grid, THREADS // 32, 1, work, _boxes(spec, anchors, work),
        shared=shared_bytes(schedule),
    )  # fmt: skip


def _boxes(
    spec: KernelSpec, anchors: Sequence[Node], work: tuple[Pointer, ...]
) -> tuple[Descriptor, ...]:
    """The matrices that come by the copy engine: coded rows, and the tiles of each weight."""
    k = constant(spec.body.type_of(anchors[0].inputs[0]).shape[-1])
    codes = next(p for p in work if p.name == "codes")
    rows = to_json(anchors[0].type.shape[0])
    found = [Descriptor("row_tiles", "workspace", "fp8e4nv", codes.offset, rows, k, (ROWS, SPAN))]
    for i, anchor in enumerate(anchors):
        height = _panels(anchor) * spans(k) * TILE_ROWS
        box = TILE_ROWS, SPAN
        found.append(
            Descriptor(f"tiles{i}", anchor.inputs[1], "fp8e4nv", 0, height, SPAN, box)
        )
    return tuple(found)


def scaled_source(spec: KernelSpec, anchors: Sequence[Node], work: tuple[Pointer, ...]) -> str:
    """Return the text of the kernel in CUDA, scanned as every source is."""
    schedule, body, segments = spec.schedule.values, spec.body, spec.numerics.segments
    k = constant(body.type_of(anchors[0].inputs[0]).shape[-1])
    units = _units(spec, anchors)
    given = [
        f"const __grid_constant__ tw_map {d.name}, int {d.name}_rows, int {d.name}_cols, "
        f"int64_t {d.name}_step, int64_t {d.name}_one"
        for d in _boxes(spec, anchors, work)
    ]
    text = environment().get_template("cuda/scaled.cu.j2").render(
        parameters=", ".join([*given, parameters(spec, work)]),
        num_rows=to_json(anchors[0].type.shape[0]),
        spans=k // SPAN,
        stages=schedule["stages"],
        threads=THREADS,
        registers=REGISTERS[2, 1],
        beside=segments if schedule["split"] else 1,
        segment_spans=segment_length(k, segments) // SPAN if segments > 1 else k // SPAN,
        split=bool(schedule["split"]),
        width=sum(constant(a.type.shape[-1]) for a in anchors),
        units=units,
    )
    return KernelSource(spec.symbol, "cuda", text).text


def _units(spec: KernelSpec, anchors: Sequence[Node]) -> list[Mapping[str, Any]]:
    """Weights whose sums meet in a block, with the blocks along their columns."""
    body, split = spec.body, bool(spec.schedule.values["split"])
    found: list[Mapping[str, Any]] = []
    start = column = 0
    for nodes in sections_of(body, list(anchors)):
        mine = [a for a in nodes if a in anchors]
        for met in [[a] for a in mine] if split else [mine]:
            n = constant(met[0].type.shape[-1])
            stop = start + -(-n // (HALF * 2 // len(met)))
            results = [v for _, v in body.outputs if v in {m.name for m in nodes}]
            rounds = (
                _rounds(met, "parts", "f32", [f"pair[e] = acc_{met[0].name}[0];"])
                if split
                else [r for v in results for r in _results(body, nodes, met, v)]
            )
            found.append(
                {
                    "weights": [
                        {"tiles": f"tiles{anchors.index(a)}", "scales": f"{a.inputs[1]}_d"}
                        for a in met
                    ],
                    "n": n,
                    "panels": _panels(met[0]),
                    "start": start,
                    "stop": stop,
                    "column": column,
                    "sums": [a.name for a in met],
                    "rounds": rounds,
                }
            )
            start, column = stop, column + n * len(met)
    return found


def _rounds(
    met: Sequence[Node], name: str, kind: str, lines: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Results leave in rounds of at most 512 bytes a row: `halves` of a block in each, and `lines`
    that make element `e` of a pair of neighbours."""
    halves = [[0]] if len(met) == 2 else [[0, 1]] if kind == "bf16" else [[0], [1]]
    size = {"bf16": 2, "f32": 4}[kind]
    return [
        {"name": name, "type": _TYPES[kind], "bytes": size, "halves": h, "lines": lines}
        for h in halves
    ]


def _results(
    body: Graph, nodes: Sequence[Node], met: Sequence[Node], value: str
) -> list[Mapping[str, Any]]:
    """The rounds of one result of an epilogue."""
    lines = epilogue(
        body, nodes, met, ("col",), "row", lambda name: "pair[e]" if name == value else None
    )
    # One instruction in place of ten.
    lines = [line.replace("tw_round_bf16(", "tw_rounded(") for line in lines]
    return _rounds(met, value, body.type_of(value).dtype.name, lines)


def _panels(anchor: Node) -> int:
    return -(-constant(anchor.type.shape[-1]) // TILE_ROWS)
