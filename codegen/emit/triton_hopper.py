"""Contractions of codes on Hopper's cores whose rows are made, and whose segments are added, by
kernels in Triton: the one kernel of a source that is written in CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cuda_chip import SHARED_BYTES
from tilewright.codegen.emit.cuda_latent import parameters
from tilewright.codegen.emit.cuda_sums import (
    REGISTERS,
    block_bytes,
    block_warps,
    epilogue,
    refuses_epilogue,
)
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import Launch, Pointer
from tilewright.codegen.emit.triton_route import num_slots
from tilewright.codegen.numerics import segment_length
from tilewright.codegen.pack_tiles import SPAN, TILE_BITS, TILE_ROWS, lies_in_parts
from tilewright.codegen.sections import sections_of
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec, Numerics
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson, to_json
from tilewright.graph.types import BlockFormat

WIDE = 2  # from this value of `hopper` in a schedule on, so many groups of warps multiply
Sections = Sequence[Mapping[str, Any]]


def refuses_hopper(body: Graph, numerics: Numerics, anchors: Sequence[Node]) -> str | None:
    """Say why a contraction has no kernel here, or return None."""
    first = body.type_of(anchors[0].inputs[0])
    types = [body.type_of(a.inputs[1]).dtype for a in anchors]
    grouped = [a for a in anchors if a.op == "grouped_linear"]
    if numerics.atom != "mma" or any(a.op != "linear" for a in anchors if a not in grouped):
        return "products are of other operands"
    if grouped and (len(anchors) > 1 or constant(anchors[0].type.shape[-1]) % (2 * TILE_ROWS)):
        return "columns of groups do not fill blocks"
    if not isinstance(first.dtype, BlockFormat) and first.dtype.name != "bf16":
        return f"rows are {first.dtype}, want what bf16 holds"
    if {t.name for t in types} != {"fp8_e4m3"}:
        return "weights are not all fp8 codes"
    if not isinstance(types[0], BlockFormat) or not lies_in_parts(types[0].name, types[0].block):
        return "weights do not lie in parts"
    if constant(first.shape[-1]) % SPAN:
        return f"k = {first.shape[-1]} is no multiple of {SPAN}"
    for nodes in sections_of(body, list(anchors)):
        if refusal := refuses_epilogue(body, nodes):
            return refusal
    return None


def met_weights(body: Graph, anchors: Sequence[Node], *, split: bool) -> int:
    """Return how many weights' sums meet in a block: 0 where that differs."""
    counts = {sum(a in nodes for a in anchors) for nodes in sections_of(body, list(anchors))}
    return 1 if split else counts.pop() if len(counts) == 1 and max(counts) <= 2 else 0


def fits(body: Graph, anchors: Sequence[Node], schedule: Mapping[str, int]) -> bool:
    """Say whether a block's stages fit its shared memory, and its sums its registers."""
    met = met_weights(body, anchors, split=bool(schedule["split"]))
    if not met:
        return False
    if schedule["hopper"] >= WIDE:
        tiles, n = schedule["hopper"] * schedule["each"], constant(anchors[0].type.shape[-1])
        if tiles % met or (anchors[0].op == "grouped_linear" and n % (tiles * TILE_ROWS)):
            return False
    return linear_bytes(body, anchors, schedule) <= SHARED_BYTES


def linear_bytes(body: Graph, anchors: Sequence[Node], schedule: Mapping[str, int]) -> int:
    """Return the shared memory of a block."""
    wide = schedule["hopper"] >= WIDE
    weights = schedule["hopper"] * schedule["each"]
    if not wide:
        weights = met_weights(body, anchors, split=bool(schedule["split"]))
    return block_bytes(schedule, weights=weights, bits=_bits(body, anchors), wide=wide)


def hopper_launch(spec: KernelSpec, anchors: Sequence[Node], work: tuple[Pointer, ...]) -> Launch:
    """Return the launch of the kernel in CUDA."""
    schedule, body = spec.schedule.values, spec.body
    units = _units(spec, anchors)
    rows = to_json(anchors[0].type.shape[0])
    beside = spec.numerics.segments if schedule["split"] else 1
    blocks: DimJson = ["mul", ["ceildiv", rows, schedule["bm"]], units[-1]["stop"]]
    warps = block_warps(schedule["hopper"] if schedule["hopper"] >= WIDE else 0)
    shared = linear_bytes(body, anchors, schedule)
    return Launch("contract", (blocks, 1, beside), warps, 1, work, shared=shared)


def hopper_source(spec: KernelSpec, anchors: Sequence[Node], work: tuple[Pointer, ...]) -> str:
    """Return the text of the kernel in CUDA, scanned as every source is."""
    schedule, body, segments = spec.schedule.values, spec.body, spec.numerics.segments
    value = anchors[0].inputs[0]
    k, bits = constant(body.type_of(value).shape[-1]), _bits(body, anchors)
    text = environment().get_template("cuda/linear.cu.j2").render(
        parameters=parameters(spec, work),
        activation="activation" if value in body.node else value,
        num_rows=to_json(anchors[0].type.shape[0]),
        slots=num_slots(anchors[0]),
        across=_blocks(spec, anchors[:1]),
        bits=bits,
        up="64.0f" if bits == 4 else "1.0f",
        spans=k // SPAN,
        rows=schedule["bm"],
        stages=schedule["stages"],
        blocks=schedule["blocks"],
        wide=schedule["hopper"] if schedule["hopper"] >= WIDE else 0,
        each=schedule["each"],
        registers=REGISTERS.get((schedule["hopper"], schedule["blocks"])),
        segments=segments,
        segment_spans=segment_length(k, segments) // SPAN if segments > 1 else k // SPAN,
        split=bool(schedule["split"]),
        width=sum(constant(a.type.shape[-1]) for a in anchors),
        units=_units(spec, anchors),
    )
    return KernelSource(spec.symbol, "cuda", text).text


def _bits(body: Graph, anchors: Sequence[Node]) -> int:
    return TILE_BITS[body.type_of(anchors[0].inputs[1]).dtype.name]


def _units(spec: KernelSpec, anchors: Sequence[Node]) -> list[Mapping[str, Any]]:
    """Weights whose sums meet in a block, with the blocks along their columns."""
    body, schedule = spec.body, spec.schedule.values
    column, place = 0, {}
    for nodes in sections_of(body, list(anchors)):
        for anchor in (a for a in nodes if a in anchors):
            place[anchor.name] = column
            column += constant(anchor.type.shape[-1])
    groups: list[tuple[list[Node], list[Node]]] = []
    for nodes in sections_of(body, list(anchors)):
        mine = [a for a in nodes if a in anchors]
        groups += [([a], nodes) for a in mine] if schedule["split"] else [(mine, nodes)]
    found: list[Mapping[str, Any]] = []
    start = 0
    for mine, nodes in groups:
        n, groups_of = constant(mine[0].type.shape[-1]), num_slots(mine[0])
        blocks = _blocks(spec, mine) * (groups_of or 1)
        weights = [a.inputs[1] for a in mine]
        index, row = (("slot", "col"), "token") if groups_of else (("col",), "row")
        found.append(
            {
                "weights": [
                    {"codes": w, "scales": f"(const unsigned char*){w}_d"} for w in weights
                ],
                "n": n,
                "panels": -(-n // TILE_ROWS) * (groups_of or 1),
                "start": start,
                "stop": start + blocks,
                "columns": [place[a.name] for a in mine],
                "sums": [a.name for a in mine],
                "epilogue": [] if schedule["split"] else epilogue(body, nodes, mine, index, row),
            }
        )
        start += blocks
    return found


def _blocks(spec: KernelSpec, met: Sequence[Node]) -> int:
    """Blocks along the columns of weights whose sums meet: a panel of each, or of each group."""
    panels = -(-constant(met[0].type.shape[-1]) // TILE_ROWS)
    schedule = spec.schedule.values
    tiles = schedule["hopper"] * schedule["each"]
    return -(-panels // (tiles // len(met))) if schedule["hopper"] >= WIDE else panels
