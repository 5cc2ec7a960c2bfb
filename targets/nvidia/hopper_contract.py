"""Contractions of codes for Hopper's cores in CUDA: what is accepted, schedules, scratch."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.emit.cuda_contract import shared_bytes
from tilewright.codegen.emit.triton_contract import contractions
from tilewright.codegen.emit.triton_route import route_parts
from tilewright.codegen.pack_tiles import SPAN
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate, from_json, symbols_of
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat
from tilewright.targets.nvidia.contract import SECTION, accepts_contract

SHARED_BYTES = 227 << 10
_LED_ROWS = 256
_STORED = ("f32", "bf16")


def accepts_hopper(body: Graph) -> str | None:
    """Return why a body is refused, or None."""
    anchors = contractions(body)
    if any(n.op != "expert_linear" for n in anchors):
        return "rows are not sorted by their matrix"
    if refusal := accepts_contract(body):
        return refusal
    if len(anchors) > 2 or len({(n.inputs[0], n.type.shape) for n in anchors}) > 1:
        return "more than two weights of one size meet"
    x, weights = body.type_of(anchors[0].inputs[0]), [body.type_of(n.inputs[1]) for n in anchors]
    if any(w.dtype.name != "fp4_e2m1" for w in weights):
        return "weights are not fp4 codes"
    if not isinstance(x.dtype, BlockFormat) and x.dtype.name != "bf16":
        return f"rows are {x.dtype}, want what bf16 holds"
    if int(x.shape[-1]) % SPAN:
        return f"k = {x.shape[-1]} is no multiple of {SPAN}"
    return _refuses_epilogue(body)


def _refuses_epilogue(body: Graph) -> str | None:
    """Say why what follows the sums cannot be computed from one place of each."""
    for node in body.nodes:
        if op_def(node.op).kind is Kind.CONTRACT:
            continue
        if op_def(node.op).kind is not Kind.ELEMENTWISE or op_def(node.op).scalar is None:
            return f"'{node.op}' follows the sums"
        for name in node.inputs:
            type_ = body.type_of(name)
            if name not in body.node and type_.dtype.name not in _STORED:
                return f"an epilogue reads {type_.dtype}"
            if symbols_of(type_.shape[1:]):
                return f"an epilogue reads {type_}"
    if any(body.type_of(v).dtype.name not in _STORED for _, v in body.outputs):
        return "results are neither f32 nor bf16"
    return None


# Rows of a block; stages; blocks of a core at least. Fewer stages leave room for more blocks.
_FEW = ((8, 5, 4), (8, 8, 2), (8, 6, 3), (16, 5, 3), (32, 4, 2), (64, 3, 2))
_WIDE = ((192, 3), (128, 4), (96, 4))


def hopper_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Blocks of few rows where weights are most of what is read, wide ones where one weight meets
    many; `rows` are tokens, and how many rows a matrix meets is known for an even load only."""
    anchors = contractions(body)
    slots = int(anchors[0].type.shape[1])
    matrices = int(body.type_of(anchors[0].inputs[1]).shape[0])
    meets = -(-rows * slots // matrices)
    few = [
        Schedule.of(bm=bm, stages=stages, blocks=blocks, wide=0, listed=listed)
        for listed in ((0, 1) if rows * slots <= _LED_ROWS else (1,))
        for bm, stages, blocks in sorted(_FEW, key=lambda f: -(-meets * 2 // f[0]) * (16 + f[0]))
    ]
    wide = [
        Schedule.of(bm=bm, stages=stages, blocks=1, wide=1, listed=1)
        for bm, stages in sorted(_WIDE, key=lambda f: (f[0] < meets * 1.2, f[0]))
    ]
    found = few + wide if meets < 24 else wide + few
    return tuple(s for s in found if shared_bytes(body, s) <= SHARED_BYTES)


def hopper_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Bytes of the lists of routed rows."""
    parts = route_parts(body, contractions(body)[0], schedule.values)
    sizes = [evaluate(from_json(size), bounds) for _, size in parts.values()]
    return sum(-(-size // SECTION) * SECTION for size in sizes) or SECTION


CONTRACT_HOPPER = KernelTemplate(
    "contract_hopper", "contract", "cuda/contract.cu.j2", accepts_hopper, hopper_schedules,
    hopper_scratch,
)  # fmt: skip
