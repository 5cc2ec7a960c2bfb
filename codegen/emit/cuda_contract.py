"""Texts of the CUDA template of contractions of codes, and the memory that it works in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.codegen.emit.cuda_chip import MULTIPROCESSORS
from tilewright.codegen.emit.cuda_latent import parameters
from tilewright.codegen.emit.cuda_sums import REGISTERS, block_bytes, block_warps, epilogue
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_contract import contractions
from tilewright.codegen.emit.triton_host import (
    Launch,
    Pointer,
    host_text,
    workspace_pointers,
)
from tilewright.codegen.emit.triton_route import num_blocks, num_slots, result_rows, route_parts
from tilewright.codegen.pack_tiles import SPAN, TILE_BITS, TILE_ROWS, matrix_bytes, row_bytes
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson
from tilewright.graph.ops import Kind, op_def

INSTANCES = (16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 128)  # columns of a product of many rows
_ROUTE_WORDS = 32
_OTHER_REGISTERS = 72  # of a thread of many rows, besides sums, with two sets of decoded codes


def shared_bytes(body: Graph, schedule: Schedule) -> int:
    """Return the shared memory of a block: stages, its list of rows, barriers."""
    values, anchors = schedule.values, contractions(body)
    bits = TILE_BITS[body.type_of(anchors[0].inputs[1]).dtype.name]
    wide = values["wide"]
    weights = wide * values["each"] if wide else len(anchors)
    return block_bytes(values, weights=weights, bits=bits, wide=wide > 0)


def contract(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the template's variables."""
    body, schedule, anchors = spec.body, spec.schedule.values, contractions(spec.body)
    first = anchors[0]
    work, scratch = workspace_pointers(route_parts(body, first, schedule))
    launches = _launches(spec, anchors, work)
    n, format = constant(first.type.shape[-1]), body.type_of(first.inputs[1]).dtype.name
    words = _ROUTE_WORDS + constant(body.type_of(first.inputs[1]).shape[0]) + 1
    shared = {
        "contract": shared_bytes(body, spec.schedule),
        "route_rows": _ROUTE_WORDS * 4,
        "route_blocks": words * 4,
    }
    return {
        "parameters": parameters(spec, work),
        "weights": [_weight(body, a) for a in anchors],
        "activation": first.inputs[0],
        "bits": TILE_BITS[format],
        "spans": constant(body.type_of(first.inputs[0]).shape[-1]) // SPAN,
        "n": n,
        "panels": _panels(spec, anchors),
        "rows": schedule["bm"],
        "stages": schedule["stages"],
        "blocks": schedule["blocks"],
        "wide": schedule["wide"],
        "each": schedule["each"],
        "sets": num_sets(schedule),
        "registers": REGISTERS.get((schedule["wide"], schedule["blocks"])),
        "instances": [*(i for i in INSTANCES if i < schedule["bm"]), schedule["bm"]],
        "route": _route(body, first, schedule),
        "slots": num_slots(first),
        "slotted": _slotted(body, anchors),
        "up": "64.0f" if TILE_BITS[format] == 4 else "1.0f",
        "sums": [a.name for a in anchors],
        "epilogue": epilogue(body, body.nodes, anchors, ("slot", "col"), "token"),
        "images": [
            {
                "kernel": launch.kernel,
                "threads": launch.num_warps * 32,
                "shared": shared[launch.kernel],
            }
            for launch in launches
        ],
        "work": work,
        "launches": launches,
        "host": host_text(spec, launches, scratch),
    }


def num_sets(schedule: Mapping[str, int]) -> int:
    """Return how many sets of registers hold decoded codes: two where sums leave room for them."""
    if not schedule["wide"]:
        return 1
    registers, _ = REGISTERS[schedule["wide"], schedule["blocks"]]
    return 2 if schedule["bm"] * schedule["each"] // 2 + _OTHER_REGISTERS <= registers else 1


def _panels(spec: KernelSpec, anchors: Sequence[Node]) -> int:
    """Blocks along the columns: a panel of each weight, or of each group of warps."""
    panels = -(-constant(anchors[0].type.shape[-1]) // TILE_ROWS)
    values = spec.schedule.values
    return -(-panels // max(1, values["wide"] * values["each"] // len(anchors)))


def _weight(body: Graph, anchor: Node) -> Mapping[str, Any]:
    type_ = body.type_of(anchor.inputs[1])
    n, k = (constant(d) for d in type_.shape[-2:])
    assert row_bytes(type_.dtype.name) * 8 == SPAN * TILE_BITS[type_.dtype.name]
    name = anchor.inputs[1]
    return {
        "codes": name,
        "scales": f"(const unsigned char*){name}_d",
        "stride": matrix_bytes(type_.dtype.name, n, k),
    }


def _route(body: Graph, anchor: Node, schedule: Mapping[str, int]) -> Mapping[str, Any]:
    x, w, ids = anchor.inputs
    matrices, rows = constant(body.type_of(w).shape[0]), _text(result_rows(anchor))
    full = f"({rows} + {schedule['bm'] - 1}) / {schedule['bm']} + {matrices + 1}"
    return {
        "listed": bool(schedule["listed"]),
        "ids": ids,
        "matrices": matrices,
        "num_rows": rows,
        "num_blocks": f"min({rows}, {full})",
        "share": num_slots(anchor) if body.type_of(x).rank == 2 else 1,
    }


def _text(tree: DimJson) -> str:
    return f"({tree[1]} * {tree[2]})" if isinstance(tree, list) else str(tree)


def _launches(
    spec: KernelSpec, anchors: Sequence[Node], work: tuple[Pointer, ...]
) -> list[Launch]:
    """The kernels that make lists, if any, and the contraction."""
    body, schedule, first = spec.body, spec.schedule.values, anchors[0]
    matrices = constant(body.type_of(first.inputs[1]).shape[0])
    blocks: DimJson = ["mul", num_blocks(body, first, schedule), _panels(spec, anchors)]
    if schedule["wide"]:
        blocks = ["min", blocks, MULTIPROCESSORS * schedule["blocks"]]
    found = []
    if schedule["listed"]:
        found = [
            Launch("route_rows", (matrices + 1, 1, 1), 32, 1, work),
            Launch("route_blocks", (1, 1, 1), 32, 1, work),
        ]
    return [*found, Launch("contract", (blocks, 1, 1), block_warps(schedule["wide"]), 1, work)]


def _slotted(body: Graph, anchors: Sequence[Node]) -> bool:
    """Whether the epilogue reads what lies by token and slot."""
    known = {a.name for a in anchors}
    return any(op_def(n.op).kind is Kind.ELEMENTWISE and i not in body.node
               for n in body.nodes if n.name not in known for i in n.inputs)  # fmt: skip
