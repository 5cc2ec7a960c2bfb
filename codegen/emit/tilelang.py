"""Contractions of bf16 in TileLang: the one kernel of a Triton source whose other kernels make rows
and add segments. The toolchain prints CUDA from the program; parameters are named by their place,
and the host passes them in the order in which they are printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.shapes import constant, has_rows, inner_shape
from tilewright.codegen.emit.triton_host import Descriptor, Launch, Pointer
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.numerics import segment_length
from tilewright.codegen.sections import sections_of
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec, Numerics
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Var

LANGUAGE = "tilelang"
# Values of `tilelang` in a schedule: rows or weights are the left operand of groups of warps, or of
# products whose sums lie in tensor memory.
UPRIGHT, TURNED, TENSOR_MEMORY, TENSOR_MEMORY_TURNED = 1, 2, 3, 4
PIECE = 64  # columns of sums that leave tensor memory at a time
SUM_COLUMNS = 512  # of tensor memory
GROUP = 128  # threads of a group of warps
NEIGHBOURS = 8  # blocks of rows that share columns before the next columns come
BOX = 64  # values of k that one copy brings: 128 bytes
_TYPES = {"f32": "float32", "bf16": "bfloat16"}
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Operand:
    """A tensor beside the products: its parameter, the argument it is, how it lies, and, of a
    result, what an element is: an expression, or sums as they are."""

    name: str
    tensor: str
    dtype: str
    rowwise: bool
    columns: int
    value: str = ""
    sums: bool = False


def refuses_tilelang(body: Graph, numerics: Numerics, anchors: Sequence[Node]) -> str | None:
    """Say why a contraction has no program here, or return None."""
    types = [body.type_of(i) for a in anchors for i in a.inputs[:2]]
    if any(a.op != "linear" for a in anchors):
        return "rows meet more than one matrix"
    if numerics.atom != "mma" or any(t.dtype.name != "bf16" for t in types):
        return "operands are not all bf16"
    if int(types[0].shape[-1]) % 8:
        return f"k = {types[0].shape[-1]}: rows are no multiple of 16 bytes"
    if not isinstance(to_json(anchors[0].type.shape[0]), str):
        return "rows are not one of the kernel's ints"
    for nodes in sections_of(body, list(anchors)):
        if refusal := _refuses_section(body, nodes):
            return refusal
    return None


def _refuses_section(body: Graph, nodes: Sequence[Node]) -> str | None:
    names = {n.name for n in nodes}
    anchors = [n for n in nodes if op_def(n.op).kind is Kind.CONTRACT]
    rows, n = anchors[0].type.shape[0], constant(anchors[0].type.shape[-1])
    for node in nodes:
        if node.name in {v for _, v in body.outputs} and node.type.dtype.name not in _TYPES:
            return f"a result is {node.type.dtype}"
        if node in anchors:
            continue
        if op_def(node.op).kind is not Kind.ELEMENTWISE or op_def(node.op).scalar is None:
            return f"'{node.op}' follows the sums"
        for value in (v for v in node.inputs if v not in names):
            type_ = body.type_of(value)
            if value in body.node or type_.dtype.name not in _TYPES:
                return f"an epilogue reads '{value}', {type_.dtype}"
            if inner_shape(type_, node.type.rank, rows) != (n,):
                return f"an epilogue reads {type_}, want {n} columns"
    return None


def met_weights(body: Graph, anchors: Sequence[Node], *, split: bool) -> int:
    """Return how many weights' sums meet in a block: 0 where that differs."""
    if split:
        return 1
    counts = {sum(a in nodes for a in anchors) for nodes in sections_of(body, list(anchors))}
    return counts.pop() if len(counts) == 1 else 0


def shared_bytes(schedule: Mapping[str, int], weights: int) -> int:
    """Return the shared memory that the stages of a block take, and results on their way out."""
    rows = schedule["bm"] + weights * schedule["bn"]
    out = schedule["bm"] * schedule["bn"] * 2 * schedule["teams"] if schedule["staged"] else 0
    return schedule["stages"] * rows * schedule["bk"] * 2 + out


def refuses_staging(body: Graph, anchors: Sequence[Node]) -> str | None:
    """Say why results cannot leave by the copy engine, a bf16 tile of each section that was at most
    one tile of rows before, or return None."""
    counts = set()
    for nodes in sections_of(body, list(anchors)):
        mine = [a for a in nodes if a in anchors]
        if constant(mine[0].type.shape[-1]) % 8:
            return "rows of results are no multiple of 16 bytes"
        found = _epilogue(body, nodes, mine, {}, "i, j")
        rows = [o for o in found["reads"] if o.rowwise]
        if [w.dtype for w in found["writes"]] != ["bfloat16"]:
            return "results are not one of bf16"
        if any(o.dtype != "bfloat16" for o in rows) or len(rows) > 1:
            return "more than rows of bf16 are added"
        counts.add(len(rows))
    return None if len(counts) == 1 else "sections differ"


def tile_launch(
    spec: KernelSpec, anchors: Sequence[Node], activation: Pointer, work: Sequence[Pointer]
) -> Launch:
    """Return the launch of the program, with the names of its tensor maps and pointers."""
    schedule, k = spec.schedule.values, _row_length(spec, anchors)
    rows = to_json(anchors[0].type.shape[0])
    units = _units(spec, anchors)
    maps = [Descriptor("p_x_desc", activation.tensor, "bf16", activation.offset, rows, k,
                       (schedule["bm"], BOX))]  # fmt: skip
    for unit in units:
        maps += [
            Descriptor(f"{w['name']}_desc", w["tensor"], "bf16", 0, unit["n"], k,
                       (schedule["bn"], BOX))
            for w in unit["weights"]
        ]  # fmt: skip
    moved = [o for o in _operands(units) if schedule["staged"] and o.rowwise]
    maps += [Descriptor(f"{o.name}_desc", o.tensor, "bf16", 0, rows, o.columns,
                        (schedule["bm"], BOX)) for o in moved]  # fmt: skip
    named = [Pointer(o.name, o.tensor, _SHORT[o.dtype]) for o in _operands(units) if o not in moved]
    if schedule["split"]:
        named += [replace(p, name="p_parts") for p in work if p.name == "parts"]
    tiles: DimJson = ["mul", ["ceildiv", rows, schedule["bm"]], units[-1]["stop"] * _beside(spec)]
    grid: tuple[DimJson, DimJson, DimJson] = (["min", tiles, schedule["cores"]], 1, 1)
    return Launch("contract", grid, schedule["warps"] + 4, 1, tuple(work), tuple(maps),
                  named=tuple(named), rows=rows)  # fmt: skip


def tile_source(spec: KernelSpec, anchors: Sequence[Node]) -> str:
    """Return the text of the program, scanned as every source is."""
    schedule, segments = spec.schedule.values, spec.numerics.segments
    k = _row_length(spec, anchors)
    units = _units(spec, anchors)
    beside = _beside(spec)
    length = segment_length(k, segments) if segments > 1 else k
    if segments > 1 and length % schedule["bk"]:
        raise LowerError(f"schedule 'bk': got {schedule['bk']}, want a part of {length}")
    turned, in_memory = _is_turned(schedule), schedule["tilelang"] >= TENSOR_MEMORY
    groups, teams = schedule["warps"] // 4, schedule["teams"]
    along, across = schedule["bm"], schedule["bn"]
    if turned:
        along, across = across, along
    met, piece = len(units[0]["weights"]), schedule["bn"]
    if in_memory and not turned:
        piece = min(piece, PIECE)
    name = "contract_tmem" if in_memory else "contract"
    text = environment().get_template(f"tilelang/{name}.py.j2").render(
        k=k,
        units=units,
        operands=_operands(units),
        met=met,
        blocks=units[-1]["stop"],
        parts=sum(constant(a.type.shape[-1]) for a in anchors),
        piece=piece,
        pieces=schedule["bn"] // piece,
        buffers=2 if 2 * met * across <= SUM_COLUMNS else 1,
        arrive=1 if in_memory else groups // teams * GROUP,
        staged=bool(schedule["staged"]),
        rests=bool(schedule["staged"]) and any(o.rowwise for o in units[0]["reads"]),
        beside=beside,
        turns=segments // beside,
        steps=-(-length // schedule["bk"]),
        length=length,
        teams=teams,
        threads=(groups + 1) * GROUP,
        policy="FullRow" if along // 64 >= groups // teams else "FullCol",
        turned=turned,
        near=NEIGHBOURS,
        **{name: schedule[name] for name in ("bm", "bn", "bk", "stages", "cores")},
    )  # fmt: skip
    return KernelSource(spec.symbol, LANGUAGE, text).text


def _is_turned(schedule: Mapping[str, int]) -> bool:
    return schedule["tilelang"] in (TURNED, TENSOR_MEMORY_TURNED)


def _beside(spec: KernelSpec) -> int:
    return spec.numerics.segments if spec.schedule.values["split"] else 1


def _row_length(spec: KernelSpec, anchors: Sequence[Node]) -> int:
    return constant(spec.body.type_of(anchors[0].inputs[0]).shape[-1])


def _operands(units: Sequence[Mapping[str, Any]]) -> list[Operand]:
    """What epilogues read and write, each once."""
    return list(dict.fromkeys(o for u in units for o in (*u["reads"], *u["writes"])))


def _units(spec: KernelSpec, anchors: Sequence[Node]) -> list[Mapping[str, Any]]:
    """Weights whose sums meet in a block, with the blocks along their columns."""
    body, bn, split = spec.body, spec.schedule.values["bn"], spec.schedule.values["split"]
    at = "j, i" if _is_turned(spec.schedule.values) else "i, j"
    found: list[Mapping[str, Any]] = []
    groups: list[tuple[list[Node], list[Node]]] = []
    for nodes in sections_of(body, list(anchors)):
        met = [a for a in nodes if a in anchors]
        groups += [([a], nodes) for a in met] if split else [(met, nodes)]
    start = column = count = 0
    names: dict[str, Operand] = {}
    for mine, nodes in groups:
        n = constant(mine[0].type.shape[-1])
        stop = start + -(-n // bn)
        unit = {
            "weights": [
                {"name": f"p_w{count + i}", "tensor": a.inputs[1]} for i, a in enumerate(mine)
            ],
            "n": n,
            "ragged": n % bn != 0,
            "start": start,
            "stop": stop,
            "columns": [column + n * i for i in range(len(mine))],
            "reads": [],
            "writes": [],
        }
        found.append(unit if split else unit | _epilogue(body, nodes, mine, names, at))
        start, column, count = stop, column + n * len(mine), count + len(mine)
    return found


def _epilogue(
    body: Graph,
    nodes: Sequence[Node],
    anchors: Sequence[Node],
    names: dict[str, Operand],
    at: str,
) -> dict[str, Any]:
    """Elementwise nodes on the sums: operands by parameter, and each result as an expression of
    the element at `at` of a tile; `names` grows by the operands and results."""
    rows, n = anchors[0].type.shape[0], constant(anchors[0].type.shape[-1])
    known = {a.name: f"acc{i}[{at}]" for i, a in enumerate(anchors)}
    reads: dict[str, Operand] = {}
    outputs = {value for _, value in body.outputs}
    writes: list[Operand] = []
    for node in nodes:
        if node.name not in known:
            scalar = op_def(node.op).scalar
            assert scalar is not None, node
            given = {}
            for place, value in enumerate(node.inputs):
                if value not in known:
                    type_ = body.type_of(value)
                    rowwise = value not in body.weight and has_rows(type_, node.type.rank, rows)
                    reads[value] = names.setdefault(
                        value,
                        Operand(f"p_r{len(names)}", value, _TYPES[type_.dtype.name], rowwise, n),
                    )
                    known[value] = f"element_{reads[value].name}"
                given[f"operand{place}"] = known[value]
            known[node.name] = print_scalar(scalar(node.attr, *map(Var, given)), given, LANGUAGE)
        if node.name in outputs:
            dtype = _TYPES[node.type.dtype.name]
            output = Operand(
                f"p_y{len(names)}", node.name, dtype, True, n, known[node.name], node in anchors
            )
            names[node.name] = output
            writes.append(output)
    return {"reads": list(reads.values()), "writes": writes}
