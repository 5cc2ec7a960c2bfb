"""What contractions in CUDA share: epilogues on sums, the shared memory of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.codegen.emit.cpp import element_offset
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.pack_tiles import SPAN, TILE_ROWS
from tilewright.graph import Graph, Node
from tilewright.graph.dims import symbols_of
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Var

_SCALE_BYTES = 256  # of a tile
# Of a thread that multiplies and of one that brings, by the groups that multiply and the blocks of
# a core: together as many as the assembler gives a block of them.
REGISTERS = {(2, 1): (232, 40), (2, 2): (104, 32), (3, 1): (152, 56), (4, 1): (112, 32)}
# C texts of an element, and of one that is stored, by the type in memory.
_LOADS = {"f32": "__ldg(&{0})", "bf16": "__int_as_float((int)__ldg(&{0}) << 16)"}
_STORES = {"f32": "{0}", "bf16": "(unsigned short)tw_pack({0}, 0.0f)"}


def stage_bytes(*, weights: int, bits: int, rows: int, align: int) -> int:
    """Return the bytes of shared memory of one stage: a tile of each weight, a span of rows."""
    tiles = weights * (TILE_ROWS * SPAN * bits // 8 + _SCALE_BYTES)
    return -(-tiles // align) * align + rows * SPAN * 2


def block_bytes(schedule: Mapping[str, int], *, weights: int, bits: int, wide: bool) -> int:
    """Return the shared memory of a block that brings tiles of so many weights."""
    align = 1024 if wide else 128
    each = stage_bytes(weights=weights, bits=bits, rows=schedule["bm"], align=align)
    return schedule["stages"] * (each + 16) + schedule["bm"] * 8


def block_warps(wide: int) -> int:
    """Return the warps of a block: `wide` groups of four that multiply and one that brings, or of
    few rows four warps and one."""
    return wide * 4 + 4 if wide else 5


def epilogue(
    body: Graph, nodes: Sequence[Node], anchors: Sequence[Node], index: tuple[str, ...], row: str,
    place: Callable[[str], str | None] | None = None,
) -> list[str]:  # fmt: skip
    """Elementwise nodes on `many` sums `acc_<name>`, and the stores of what leaves the kernel: of
    each output to its `place`, if it has one, else at `row` and `col` where `here` says so. `index`
    and `row` are where operands of a token lie."""
    index, row = tuple(f"{i}[m]" for i in index), f"{row}[m]"
    rows, n = anchors[0].type.shape[0], constant(anchors[0].type.shape[-1])
    place = place or (lambda name: f"if (here[m]) {name}[row[m] * {n} + col[m]]")
    known = {a.name: f"acc_{a.name}[m]" for a in anchors}
    outputs, lines = {value for _, value in body.outputs}, []
    for node in nodes:
        if node.name not in known:
            definition = op_def(node.op)
            if definition.kind is not Kind.ELEMENTWISE or definition.scalar is None:
                raise LowerError(
                    f"{node.op} '{node.name}': is no epilogue: want an elementwise op"
                )
            given = {}
            for i, value in enumerate(node.inputs):
                if value not in known:
                    at = element_offset(body, value, node, rows, index, row)
                    load = _LOADS[body.type_of(value).dtype.name]
                    known[value] = f"({load.format(f'{value}[{at}]')})"
                given[f"operand{i}"] = known[value]
            text = print_scalar(definition.scalar(node.attr, *map(Var, given)), given, "cuda")
            known[node.name] = f"t_{node.name}[m]"
            lines += [f"float t_{node.name}[many];", f"TW_EACH(many) t_{node.name}[m] = {text};"]
        if node.name in outputs and (to := place(node.name)):
            stored = _STORES[node.type.dtype.name].format(known[node.name])
            lines.append(f"TW_EACH(many) {to} = {stored};")
    return lines


def refuses_epilogue(body: Graph, nodes: Sequence[Node]) -> str | None:
    """Say why what follows sums cannot be computed from one place of each, or return None."""
    names = {n.name for n in nodes}
    for node in nodes:
        if node.name in {v for _, v in body.outputs} and node.type.dtype.name not in _STORES:
            return f"a result is {node.type.dtype}, want {' or '.join(_STORES)}"
        if op_def(node.op).kind is Kind.CONTRACT:
            continue
        if op_def(node.op).kind is not Kind.ELEMENTWISE or op_def(node.op).scalar is None:
            return f"'{node.op}' follows the sums"
        for name in node.inputs:
            type_ = body.type_of(name)
            if name in names:
                continue
            if name in body.node or type_.dtype.name not in _STORES:
                return f"an epilogue reads '{name}', {type_.dtype}"
            if symbols_of(type_.shape[1:]):
                return f"an epilogue reads {type_}"
    return None
