"""Kernel table of the Ascend 950: what templates accept, their one schedule, their workspace."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewright.codegen.emit import ascendc_attend_cube, ascendc_latent_cube, ascendc_select
from tilewright.codegen.emit.ascendc_contract import scratch_bytes, stored_bits
from tilewright.codegen.emit.ascendc_latent import LISTS
from tilewright.codegen.emit.ascendc_mx import mx_bits, mx_scratch_bytes, refuses_mx
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, Node
from tilewright.graph.dims import evaluate, symbols_of
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat
from tilewright.targets.ascend950.chip import best_coded_tile, best_mx_tile, best_tile

LONG_ROW = 16384  # entries above which argmax reads parts
_MATRICES = ("f16", "bf16", "q4_1", "q8_0", "q8_g16")  # packed as bf16
_CODED = ("f32", "fp8_e4m3", "fp4_e2m1")  # decoded by the vector cores


def _anchors(body: Graph, kind: Kind) -> list[Node]:
    return [n for n in body.nodes if op_def(n.op).kind is kind]


def _accepts_row(body: Graph) -> str | None:
    for kind in (Kind.CONTRACT, Kind.ATTEND, Kind.COMPOSITE):
        if found := _anchors(body, kind):
            return f"holds a {kind.value} node '{found[0].op}'"
    return None


def _accepts_argmax(body: Graph) -> str | None:
    """A row of this length has no room beside a second one: it is read in parts."""
    if [n.op for n in body.nodes] != ["argmax"]:
        return "takes one argmax alone"
    type_ = body.type_of(body.nodes[0].inputs[0])
    if type_.rank != 2 or str(type_.dtype) != "f32":
        return f"operand is {type_}, want f32 [rows, entries]"
    return None if int(type_.shape[1]) > LONG_ROW else f"rows of {type_.shape[1]} fit the buffer"


def _accepts_contract(body: Graph) -> str | None:
    for node in _anchors(body, Kind.CONTRACT):
        if node.op != "linear":
            return f"{node.op} has rows or matrices by a list, want linear"
        w = body.type_of(node.inputs[1])
        if w.dtype.name not in _MATRICES:
            return f"weight format {w.dtype} is not stored as bf16"
    return _accepts_matrices(body)


def _accepts_matrices(body: Graph) -> str | None:
    """What all contractions want: bf16 values in front, a weight of known extents behind."""
    for node in _anchors(body, Kind.CONTRACT):
        x, w = (body.type_of(i) for i in node.inputs[:2])
        held = isinstance(x.dtype, BlockFormat) or str(x.dtype) == "bf16"
        if not held:
            return f"activation is {x.dtype}, want bf16 (compile with --dtype bfloat16)"
        if node.inputs[1] not in body.weight:
            return "second operand is computed, want a weight"
        if symbols_of(w.shape):
            return f"weight extents are symbolic: {w}"
        if w.dtype.name not in (*_MATRICES, *_CODED):
            return f"weight format {w.dtype} has no kernel"
        if isinstance(w.dtype, BlockFormat) and int(w.shape[-1]) % (w.dtype.block[1] % 32 or 32):
            return f"k = {w.shape[-1]} is no multiple of the group of {w.dtype.block[1]}"
    return None


def _accepts_mx(body: Graph) -> str | None:
    return refuses_mx(body) or _accepts_matrices(body)


def _accepts_latent(body: Graph) -> str | None:
    (node,) = _anchors(body, Kind.ATTEND)
    if node.op not in LISTS:
        return f"takes {', '.join(LISTS)}"
    return _accepts_paged(body, node, node.inputs[0], (node.inputs[1], *node.inputs[6:7]))


def _accepts_latent_cube(body: Graph) -> str | None:
    return _accepts_latent(body) or ascendc_latent_cube.refuses_cube(body)


def _accepts_selection(body: Graph) -> str | None:
    if len(body.nodes) != 1:
        return "takes one selection alone"
    node = body.nodes[0]
    return _accepts_paged(body, node, node.inputs[0], (node.inputs[2],))


def _accepts_select(body: Graph) -> str | None:
    return _accepts_selection(body) or ascendc_select.refuses(body)


def _accepts_select_cube(body: Graph) -> str | None:
    return _accepts_selection(body) or ascendc_select.refuses_cube(body)


def _accepts_paged(body: Graph, node: Node, q: str, states: tuple[str, ...]) -> str | None:
    """Queries in memory, rows that the kernels can decode."""
    if q in body.node:
        return "queries are computed in the kernel, want an operand"
    for state in states:
        type_ = body.type_of(state)
        known = isinstance(type_.dtype, BlockFormat) or str(type_.dtype) in ("f32", "bf16")
        if not known:
            return f"rows are {type_.dtype}, want f32, bf16 or packed codes"
    return None


def _accepts_attend(body: Graph) -> str | None:
    (node,) = _anchors(body, Kind.ATTEND)
    if node.op != "attend":
        return f"takes attend, not {node.op}"
    cache = body.type_of(node.inputs[1])
    if node.inputs[0] in body.node:
        return "queries are computed in the kernel, want an operand"
    if str(cache.dtype) not in ("f32", "bf16"):
        return f"cache is {cache.dtype}, want f32 or bf16"
    row_bytes = int(cache.shape[3]) * cache.dtype.bits // 8
    if row_bytes % 32:
        return f"an entry of the cache has {row_bytes} bytes, want a multiple of 32"
    return None


def _accepts_attend_cube(body: Graph) -> str | None:
    return _accepts_attend(body) or ascendc_attend_cube.refuses_cube(body)


def _contract_schedules(cores: int) -> Callable[[Graph, Numerics, int], tuple[Schedule, ...]]:
    """One schedule for a weight shape, whatever the rows: the first by the cost model."""

    def schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
        anchors = _anchors(body, Kind.CONTRACT)
        n, k = (int(d) for d in body.type_of(anchors[0].inputs[1]).shape)
        tile = best_tile(n=n, k=k, anchors=len(anchors), cores=cores)
        return (Schedule.of(bm=tile.bm, bn=tile.bn, bk=tile.bk, cores=cores),)

    return schedules


def _coded_schedules(cores: int) -> Callable[[Graph, Numerics, int], tuple[Schedule, ...]]:
    """One schedule for a weight shape, as above; tiles of codes stand in the unified buffer too."""

    def schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
        anchors = _anchors(body, Kind.CONTRACT)
        k = int(body.type_of(anchors[0].inputs[1]).shape[-1])
        bits = max(stored_bits(body.type_of(a.inputs[1]).dtype) for a in anchors)
        tile = best_coded_tile(
            n=int(anchors[0].type.shape[-1]), k=k, anchors=len(anchors), cores=cores, bits=bits
        )
        return (Schedule.of(bm=tile.bm, bn=tile.bn, bk=tile.bk, cores=cores),)

    return schedules


def _mx_schedules(cores: int) -> Callable[[Graph, Numerics, int], tuple[Schedule, ...]]:
    """One schedule for a weight shape, as above."""

    def schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
        anchors = _anchors(body, Kind.CONTRACT)
        n, k = int(anchors[0].type.shape[-1]), int(body.type_of(anchors[0].inputs[1]).shape[-1])
        bits, decoded = mx_bits(body)
        tile = best_mx_tile(
            n=n, k=k, anchors=len(anchors), cores=cores, bits=bits, decoded=decoded
        )
        return (Schedule.of(bm=tile.bm, bn=tile.bn, bk=tile.bk, cores=cores),)

    return schedules


def _mx_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    return mx_scratch_bytes(body, bounds, schedule.values["bm"])


def _coded_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    return scratch_bytes(body, bounds, schedule.values["bm"])


def _plain(cores: int) -> Callable[[Graph, Numerics, int], tuple[Schedule, ...]]:
    def schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
        return (Schedule.of(cores=cores),)

    return schedules


def _contract_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Bytes of the activation that the prologue makes, if there is one."""
    anchors = _anchors(body, Kind.CONTRACT)
    value = anchors[0].inputs[0]
    if value not in body.node:
        return 64
    rows = evaluate(anchors[0].type.shape[0], bounds)
    return max(64, rows * int(body.type_of(value).shape[-1]) * 2)


def _no_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    return 64


def kernels(cores: int) -> tuple[KernelTemplate, ...]:
    """Return the table for a part with so many cores."""
    return (
        KernelTemplate(
            "contract", "contract", "tilelang_ascend/contract.py.j2", _accepts_contract,
            _contract_schedules(cores), _contract_scratch,
        ),
        KernelTemplate(
            "contract_mx", "contract", "ascendc/contract_mx.asc.j2", _accepts_mx,
            _mx_schedules(cores), _mx_scratch,
        ),
        KernelTemplate(
            "contract_coded", "contract", "ascendc/contract.asc.j2", _accepts_matrices,
            _coded_schedules(cores), _coded_scratch,
        ),
        KernelTemplate(
            "attend_cube", "attend", "ascendc/attend_cube.asc.j2", _accepts_attend_cube,
            _plain(cores), _no_scratch,
        ),
        KernelTemplate(
            "attend", "attend", "ascendc/attend.asc.j2", _accepts_attend, _plain(cores),
            _no_scratch,
        ),
        KernelTemplate(
            "latent_cube", "attend", "ascendc/latent_cube.asc.j2", _accepts_latent_cube,
            _plain(cores), _no_scratch,
        ),
        KernelTemplate(
            "latent", "attend", "ascendc/latent.asc.j2", _accepts_latent, _plain(cores),
            _no_scratch,
        ),
        KernelTemplate(
            "select_cube", "select", "ascendc/select_cube.asc.j2", _accepts_select_cube,
            _plain(cores), _no_scratch,
        ),
        KernelTemplate(
            "select", "select", "ascendc/select.asc.j2", _accepts_select, _plain(cores),
            _no_scratch,
        ),
        KernelTemplate(
            "argmax", "row", "ascendc/argmax.asc.j2", _accepts_argmax, _plain(cores), _no_scratch
        ),
        KernelTemplate(
            "row", "row", "ascendc/row.asc.j2", _accepts_row, _plain(cores), _no_scratch
        ),
    )  # fmt: skip
