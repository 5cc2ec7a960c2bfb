"""Latent attention on NVIDIA chips: what the template accepts, its schedules, its workspace."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.emit.cuda_latent import HEADS, WIDTH, row_format
from tilewright.codegen.emit.triton_paged import product_type
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.graph import Graph, Node
from tilewright.graph.dims import evaluate, symbols_of
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BF16, BlockFormat, ElementType

LATENT_OPS = ("attend_window", "attend_compressed", "attend_selected")
SECTION = 256  # alignment of buffers in the workspace
_MOST_FP32 = 256  # columns of a row whose products are fp32: more do not fit in shared memory
_FORMATS = (("fp8_e4m3", "ue8m0"), ("fp4_e2m1", "ue8m0"), ("fp4_e2m1", "fp8_e4m3"))


def anchor(body: Graph) -> Node:
    """Return the attention of a body."""
    (found,) = [n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND]
    return found


def refused_row(dtype: ElementType, width: int) -> str | None:
    """Say why rows of a paged state cannot be decoded, or None."""
    if width % 8:
        return f"width {width} is no multiple of 8"
    if isinstance(dtype, BlockFormat):
        group = dtype.block[1]
        plain = dtype.block[0] == 1 and dtype.minimum is None and group & (group - 1) == 0
        known = (dtype.code.name, dtype.scale.name) in _FORMATS
        return None if plain and known else f"row format {dtype} is unknown"
    return None if dtype.name in ("f32", "bf16") else f"rows are {dtype}, want f32 or bf16"


def accepts_latent(body: Graph) -> str | None:
    """Return why the template cannot express a body, or None."""
    node = anchor(body)
    if node.op not in LATENT_OPS:
        return f"'{node.op}' has keys and values of its own"
    q = body.type_of(node.inputs[0]).dtype
    if isinstance(q, BlockFormat):
        return f"queries are {q}, want f32 or bf16"
    states = [body.type_of(i) for i in (node.inputs[1], *node.inputs[6:7])]
    width = int(states[0].shape[2])
    for state in states:
        if reason := refused_row(state.dtype, width):
            return reason
    if product_type([q, *(s.dtype for s in states)]) == "float32" and width > _MOST_FP32:
        return f"fp32 rows are {width} wide, want at most {_MOST_FP32}"
    if len(node.inputs) > 8 and symbols_of(body.type_of(node.inputs[8]).shape[1:]):
        return "the count of selected entries is symbolic"
    return None


def accepts_hopper(body: Graph) -> str | None:
    """Return why the kernel for Hopper's matrix cores cannot express a body, or None."""
    node = anchor(body)
    if node.op not in LATENT_OPS:
        return f"'{node.op}' has keys and values of its own"
    states = [body.type_of(i) for i in (node.inputs[1], *node.inputs[6:7])]
    _, heads, width = body.type_of(node.inputs[0]).shape
    if int(width) != WIDTH or int(heads) % HEADS:
        return f"{heads} heads of {width}: want multiples of {HEADS} heads of {WIDTH}"
    for state in states:
        if row_format(state.dtype) is None:
            return f"row format {state.dtype} is unknown"
    casts = [n for n in body.nodes if n.name != node.name]
    narrowed = [(n.op, n.inputs, n.type.dtype) for n in casts] == [("cast", (node.name,), BF16)]
    if not narrowed or [v for _, v in body.outputs] != [casts[0].name]:
        return "more than a cast to bf16 follows"
    if node.inputs[0] in body.node or body.type_of(node.inputs[0]).dtype != BF16:
        return "queries are not bf16 in memory"
    if len(node.inputs) > 8 and symbols_of(body.type_of(node.inputs[8]).shape[1:]):
        return "the count of selected entries is symbolic"
    return None


def hopper_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Few tokens are split over blocks of so many chunks; many fill the chip with a block each."""
    blocks = rows * int(anchor(body).type.shape[1]) // HEADS
    forms = (1, 2, 0) if rows <= 4 else (2, 1, 0) if blocks <= 16 else (0, 2, 1)
    return tuple(Schedule.of(split=split) for split in (forms if blocks <= 64 else (0,)))


def latent_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Few tokens are split over units and heads; of many, each decodes its rows once for all."""
    heads = int(anchor(body).type.shape[1])
    most = min(64, max(16, 1 << (heads - 1).bit_length()))
    groups = [g for g in (16, 32, 64) if g <= most]
    forms = (1, 0) if rows <= 16 else (0, 1) if rows <= 64 else (0,)
    found = [
        Schedule.of(split=split, heads=group, columns=columns, warps=8, stages=1)
        for columns in (128, 64)
        for split in forms
        for group in (groups if split else groups[::-1])
    ]
    return tuple(dict.fromkeys(found))


def latent_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Maxima, sums and values of every unit, where units are split."""
    if not schedule.values["split"]:
        return SECTION
    node = anchor(body)
    tokens = evaluate(node.type.shape[0], bounds)
    heads, width = (int(d) for d in node.type.shape[1:])
    units = -(-int(str(node.attr["window"])) // numerics.chunk)
    units += -(-_most_entries(body, node, bounds) // numerics.chunk)
    parts = tokens * heads * units * 4
    return (2 * _up(parts) + _up(parts * width)) or SECTION


def _most_entries(body: Graph, node: Node, bounds: Mapping[str, int]) -> int:
    if len(node.inputs) == 6:
        return 0
    if len(node.inputs) == 8:
        state, tables = (body.type_of(i) for i in node.inputs[6:])
        return evaluate(tables.shape[1], bounds) * int(state.shape[1])
    return int(body.type_of(node.inputs[8]).shape[1])


def _up(num_bytes: int) -> int:
    return -(-num_bytes // SECTION) * SECTION
