"""Texts of the CUDA template of latent attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.arguments import int_names
from tilewright.codegen.emit.cuda_chip import MULTIPROCESSORS
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import (
    Launch,
    Pointer,
    host_text,
    pointers,
    softmax_parts,
)
from tilewright.codegen.emit.triton_paged import row_cells
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson, to_json
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Const
from tilewright.graph.types import BlockFormat, ElementType

CHUNK, WIDTH, HEADS = 64, 512, 64  # of a block: entries, columns, heads
THREADS, COMBINE_THREADS = 512, 128
LOG2_E = 1.4426950408889634
REGISTERS = (192, 64)  # of a thread that takes products, of one that decodes: 65,536 in all
SHARED_BYTES = 3 * 8 * 8192 + 2 * 8192 + 2 * 512 + 24 * 256 + 32 * 8 + 80 + 16 + 64
_KINDS = {"attend_compressed": "all", "attend_selected": "selected"}
_TYPES = {
    "fp32": "float", "bf16": "unsigned short", "i32": "int", "u8": "unsigned char",
    "fp8e4nv": "unsigned char",
}  # fmt: skip


def latent(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the template's variables."""
    body, split = spec.body, spec.schedule.values["split"]
    assert spec.numerics.chunk == CHUNK, spec.numerics
    (anchor,) = [n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND]
    ((_, out),) = body.outputs
    q, _, positions, request_rows, _, sink = anchor.inputs[:6]
    window = int(str(anchor.attr["window"]))
    units, num_units = _units(body, anchor, -(-window // CHUNK))
    launches, scratch = _launches(anchor, units, split)
    threads = {"combine": COMBINE_THREADS}
    return {
        "parameters": parameters(spec, launches[0].pointers),
        "split": split,
        "together": _together(anchor, split),
        "heads": constant(anchor.type.shape[1]),
        "window": window,
        "window_units": -(-window // CHUNK),
        "num_units": num_units,
        "scale": print_scalar(Const(float(str(anchor.attr["scale"])) * LOG2_E), {}, "cuda"),
        "lists": _lists(body, anchor),
        "out": out,
        "q": q,
        "positions": positions,
        "request_rows": request_rows,
        "sink": sink,
        "tokens": to_json(anchor.type.shape[0]),
        "registers": REGISTERS,
        "launches": launches,
        "images": [
            {
                "kernel": launch.kernel,
                "threads": threads.get(launch.kernel, THREADS),
                "shared": 64 if launch.kernel in threads else SHARED_BYTES,
            }
            for launch in launches
        ],
        "host": host_text(spec, launches, scratch),
    }


def row_format(dtype: ElementType) -> str | None:
    """Return the C++ type of rows of WIDTH columns, or None where the kernel cannot decode them."""
    if not isinstance(dtype, BlockFormat):
        return None
    known = {("fp8_e4m3", "ue8m0"), ("fp4_e2m1", "ue8m0"), ("fp4_e2m1", "fp8_e4m3")}
    tails = (0, 64) if dtype.code.bits == 8 else (0,)
    group = dtype.block[1]
    if (dtype.code.name, dtype.scale.name) not in known or dtype.tail not in tails:
        return None
    if group % (16 if dtype.code.bits == 4 else 8) or dtype.block[0] != 1:
        return None
    num_bytes = dtype.row_bytes(WIDTH)
    if dtype.minimum is not None or num_bytes % 8:
        return None
    e4m3 = "true" if dtype.scale.name == "fp8_e4m3" else "false"
    coded = WIDTH - dtype.tail
    return f"tw_format<{dtype.code.bits}, {coded}, {group}, {e4m3}, {num_bytes}>"


@dataclass(frozen=True)
class _State:
    """Operands of one list."""

    state: str
    tables: str


def _lists(body: Graph, anchor: Node) -> list[Mapping[str, Any]]:
    found = [_list(body, _State(anchor.inputs[1], anchor.inputs[4]), {"kind": "window"})]
    if len(anchor.inputs) == 6:
        return found
    facts: dict[str, Any] = {"kind": _KINDS[anchor.op]}
    if facts["kind"] == "all":
        facts["ratio"] = int(str(anchor.attr["ratio"]))
    else:
        facts["selected"] = anchor.inputs[8]
        facts["listed"] = constant(body.type_of(anchor.inputs[8]).shape[1])
    return [*found, _list(body, _State(anchor.inputs[6], anchor.inputs[7]), facts)]


def _list(body: Graph, of: _State, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    type_ = body.type_of(of.state)
    return {
        **facts,
        "state": of.state,
        "tables": of.tables,
        "format": row_format(type_.dtype),
        "row_bytes": row_cells(type_.dtype, WIDTH),
        "per_page": constant(type_.shape[1]),
        "stride": to_json(body.type_of(of.tables).shape[1]),
    }


def _units(body: Graph, anchor: Node, window_units: int) -> tuple[DimJson, str]:
    """Return how many chunks a token may have, as an extent and as text of the kernel."""
    if len(anchor.inputs) == 6:
        return window_units, str(window_units)
    if anchor.op == "attend_selected":
        listed = constant(body.type_of(anchor.inputs[8]).shape[1])
        total = window_units + -(-listed // CHUNK)
        return total, str(total)
    state, tables = (body.type_of(i) for i in anchor.inputs[6:8])
    pages, per_page = to_json(tables.shape[1]), constant(state.shape[1])
    extent: DimJson = ["add", window_units, ["ceildiv", ["mul", pages, per_page], CHUNK]]
    return extent, f"({window_units} + ({pages} * {per_page} + {CHUNK - 1}) / {CHUNK})"


def _launches(anchor: Node, units: DimJson, split: int) -> tuple[list[Launch], DimJson]:
    heads, tokens = constant(anchor.type.shape[1]), to_json(anchor.type.shape[0])
    groups = heads // HEADS
    if not split:
        # A block to each multiprocessor stays and takes tokens in turn.
        stay: DimJson = ["min", MULTIPROCESSORS, ["mul", tokens, groups]]
        return [Launch("attend", (stay, 1, 1), THREADS // 32)], 0
    work, scratch = softmax_parts(tokens, heads, units, WIDTH)
    blocks = groups // _together(anchor, split)
    return [
        Launch("parts", (blocks, tokens, ["ceildiv", units, split]), THREADS // 32, 1, work),
        Launch("combine", (heads, tokens, 1), COMBINE_THREADS // 32, 1, work),
    ], scratch


def _together(anchor: Node, split: int) -> int:
    """Groups of heads that share a block's only chunk: there is room for the queries of two."""
    return 2 if split == 1 and constant(anchor.type.shape[1]) % (2 * HEADS) == 0 else 1


def parameters(spec: KernelSpec, work: Sequence[Pointer]) -> str:
    """Return the parameters of every kernel: what the body writes, then what it reads."""
    written = {value for _, value in spec.body.outputs} | {p.name for p in work}
    found = [parameter(p, p.name in written) for p in (*pointers(spec), *work)]
    return ", ".join([*found, *(f"int {name}" for name in int_names(spec.body))])


def parameter(pointer: Pointer, written: bool) -> str:
    """Return one parameter of a kernel."""
    return f"{'' if written else 'const '}{_TYPES[pointer.dtype]}* {pointer.name}"
