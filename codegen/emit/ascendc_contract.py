"""Contractions as AscendC: weights as they are stored, decoded by the vector cores, multiplied by
the matrix unit in bf16; one matrix, a matrix for each group, or one of a stack for each row.

TileLang's dialect has no way to say that vector cores fill an L1 buffer that the matrix unit reads
by tiles, nor rows of a tile that a list names, so these kernels are written directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.arguments import ancestors
from tilewright.codegen.body import root_of
from tilewright.codegen.emit.ascendc_host import Launch, stored_as
from tilewright.codegen.emit.ascendc_memory import aligned, places_of
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cpp_host import cpp_extent
from tilewright.codegen.emit.cpp_route import routing
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.row_access import offset
from tilewright.codegen.emit.shapes import constant, has_rows, inner_shape
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.pack_ascend import code_bytes, coded_bytes, padded
from tilewright.codegen.sections import sections_of
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, evaluate, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Var
from tilewright.graph.types import BlockFormat, ElementType

_BITS = {"fp8": 8, "fp4": 4, "bf16": 16, "f32": 32}
_KINDS = {"experts": "experts", "groups": "groups"}


def weight_form(dtype: ElementType) -> str:
    """Return how a matrix lies in memory on this target."""
    if isinstance(dtype, BlockFormat) and dtype.code.is_float:
        return "fp8" if dtype.code.bits == 8 else "fp4"
    return "f32" if dtype.name == "f32" else "bf16"


def stored_bits(dtype: ElementType) -> int:
    """Bits of one element of a matrix as it lies in memory, without scales."""
    return _BITS[weight_form(dtype)]


@dataclass(frozen=True)
class Routes:
    """Which rows meet which matrix: `rows` all one, `groups` by slot, `experts` by ids."""

    kind: str
    slots: int
    count: int
    shared: bool
    ids: str

    @classmethod
    def of(cls, body: Graph, anchor: Node) -> Routes:
        found = routing(body, anchor)
        if found is None:
            return cls("rows", 1, 1, False, "")
        ids = anchor.inputs[2] if found["kind"] == "experts" else ""
        return cls(_KINDS[found["kind"]], found["slots"], found["count"], found["shared"], ids)

    def max_blocks(self, rows: int, bm: int) -> int:
        """Blocks of at most `bm` rows that rows of these matrices can make."""
        return min(rows, -(-rows // bm) + self.count + 1)


def activation_bytes(body: Graph, anchor: Node, bounds: Mapping[str, int]) -> int:
    """Bytes of the workspace that the activation takes, if the kernel computes it."""
    value = anchor.inputs[0]
    if value not in body.node:
        return 0
    extents = [evaluate(d, bounds) for d in body.type_of(value).shape]
    count = 1
    for extent in extents:
        count *= extent
    return -(-2 * count // 64) * 64


def scratch_bytes(body: Graph, bounds: Mapping[str, int], bm: int) -> int:
    """Bytes of workspace: the activation, then lists of rows."""
    anchor = next(n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT)
    return max(64, activation_bytes(body, anchor, bounds) + list_bytes(body, bounds, bm))


def list_bytes(body: Graph, bounds: Mapping[str, int], bm: int) -> int:
    """Bytes of the lists of rows by matrix, if ids decide which one a row meets."""
    anchor = next(n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT)
    routes = Routes.of(body, anchor)
    if routes.kind != "experts":
        return 0
    rows = evaluate(anchor.type.shape[0], bounds) * routes.slots
    return 16 * (routes.max_blocks(rows, bm) + 1) + -(-rows // 4) * 16


@dataclass(frozen=True)
class Opening:
    """What comes before the matrix unit: a computed activation, rows sorted by matrix. `start` and
    `lists` are texts: bytes of the workspace that are taken, and the pointer to the lists."""

    spec: KernelSpec
    anchors: list[Node]
    routes: Routes
    start: str

    @classmethod
    def of(cls, spec: KernelSpec) -> Opening:
        body = spec.body
        anchors = [n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT]
        value, rows, start = anchors[0].inputs[0], anchors[0].type.shape[0], "0"
        if value in body.node:
            inner = constant(inner_size(body, value, rows))
            start = f"(({cpp_extent(to_json(rows))}) * {2 * inner} + 63) / 64 * 64"
        return cls(spec, anchors, Routes.of(body, anchors[0]), start)

    @property
    def rows(self) -> Dim:
        return self.anchors[0].type.shape[0]

    def launches(self, lists: str) -> tuple[list[str], list[Launch]]:
        found = []
        if self.anchors[0].inputs[0] in self.spec.body.node:
            found.append(_prologue(self.spec, self.anchors[0].inputs[0], self.rows))
        if self.routes.kind == "experts":
            found.append(_sort(self.spec, self.routes, self.rows, lists))
        return [text for text, _ in found], [launch for _, launch in found]

    def sections(self) -> list[Section]:
        return [
            Section(self.spec, tuple(nodes), f"k_{self.spec.symbol}_{i}", self.rows, self.routes)
            for i, nodes in enumerate(sections_of(self.spec.body, self.anchors))
        ]


def contract(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return device texts and their launches in order."""
    opening = Opening.of(spec)
    lists = f"(int32_t*)((uint8_t*)workspace->data + {opening.start})"
    texts, launches = opening.launches(lists)
    for section in opening.sections():
        text, launch = _section(section, lists)
        texts.append(text)
        launches.append(launch)
    return texts, launches


def inner_size(body: Graph, value: str, rows: Dim) -> int:
    """Elements of one token's activation."""
    type_ = body.type_of(value)
    total = 1
    for extent in inner_shape(type_, type_.rank, rows):
        total *= extent
    return total


def _prologue(spec: KernelSpec, value: str, rows: Dim) -> tuple[str, Launch]:
    from tilewright.codegen.emit.ascendc import row_program

    program = row_program(
        f"k_{spec.symbol}_prologue", spec.body, ancestors(spec.body, value), rows,
        {root_of(spec.body, value): "activation"}, spec.numerics.lanes,
    )  # fmt: skip
    return program.text, program.launch(rows, scratch=("activation",))


def _most_rows(spec: KernelSpec, rows: Dim, routes: Routes) -> int:
    bounds = {d.name: d.upper for d in spec.body.dims}
    return evaluate(rows, bounds) * routes.slots


def _sort(spec: KernelSpec, routes: Routes, rows: Dim, lists: str) -> tuple[str, Launch]:
    name, most, bm = (
        f"k_{spec.symbol}_sort",
        _most_rows(spec, rows, routes),
        spec.schedule.values["bm"],
    )
    sizes = {
        "ids": 4 * most,
        "order": 4 * most,
        "counts": 4 * (routes.count + 2),
        "lists": 16 * (routes.max_blocks(most, bm) + 1),
    }
    places = places_of(spec, sizes)
    text = environment().get_template("ascendc/sort.asc.j2").render(
        name=name, count=routes.count, bm=bm, places=places,
    )  # fmt: skip
    count = f"(int32_t)(({cpp_extent(to_json(rows))}) * {routes.slots})"
    call = f"{name}((int32_t*){routes.ids}->data, {lists}, {count})"
    return text, Launch(name, "vector", call)


# --- one launch of the matrix unit --------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """What one launch of the matrix unit computes: some nodes of a body, over rows of these."""

    spec: KernelSpec
    nodes: tuple[Node, ...]
    name: str
    rows: Dim
    routes: Routes

    @property
    def anchors(self) -> list[Node]:
        return [n for n in self.nodes if op_def(n.op).kind is Kind.CONTRACT]

    @property
    def activation(self) -> str:
        """The operand, or the workspace that the prologue filled."""
        value = self.anchors[0].inputs[0]
        return "activation" if value in self.spec.body.node else value

    def weights(self) -> list[dict[str, Any]]:
        """One record for each anchor; `first` of its format."""
        found = [_weight(self.spec.body, anchor) for anchor in self.anchors]
        for place, weight in enumerate(found):
            weight["first"] = weight["format"] not in {w["format"] for w in found[:place]}
        return found

    def outputs(self) -> list[dict[str, Any]]:
        return _outputs(self.spec.body, self.nodes)

    def render(
        self, template: str, given: Sequence[tuple[str, str]], **more: Any
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return the text, and its pointers: `given`, weights, operands, outputs, the order."""
        body, tile, routes = self.spec.body, self.spec.schedule.values, self.routes
        n = constant(self.anchors[0].type.shape[-1])
        lines, operands = _epilogue(body, self.nodes, self.rows)
        pointers = [*given, *(("uint8_t", w["weight"]) for w in more["anchors"]), *operands]
        pointers += [(o["type"], o["name"]) for o in more["outputs"]]
        pointers += [("int32_t", "order")] if routes.kind == "experts" else []
        pointers = list(dict.fromkeys(pointers))
        text = environment().get_template(template).render(
            name=self.name, pointers=pointers, n=n, tiles=-(-n // tile["bn"]),
            epilogue="\n".join("    " + line for line in lines), operands=operands,
            kind=routes.kind, slots=routes.slots, count=routes.count, shared=routes.shared,
            total_rows=n * (routes.slots if routes.kind == "groups" else 1), **more, **tile,
        )  # fmt: skip
        return text, pointers

    def launch(self, pointers: Sequence[tuple[str, str]], places: Mapping[str, str]) -> Launch:
        """Return the call; `places` are texts of pointers that are no tensors."""
        arguments = [f"({t}*){places.get(p, f'{p}->data')}" for t, p in pointers]
        count = f"(int32_t)({cpp_extent(to_json(self.rows))})"
        return Launch(self.name, "mix", f"{self.name}({', '.join([*arguments, count])})")


def _section(section: Section, lists: str) -> tuple[str, Launch]:
    weights, outputs = section.weights(), section.outputs()
    k = constant(section.spec.body.type_of(section.anchors[0].inputs[0]).shape[-1])
    memory = _memory(section.spec, weights, outputs)
    x = section.activation
    text, pointers = section.render(
        "ascendc/contract.asc.j2", [("uint16_t", x)], x=x, k=k, anchors=weights,
        outputs=outputs, **memory,
    )  # fmt: skip
    return text, section.launch(pointers, {"activation": "workspace->data", "order": lists})


def _weight(body: Graph, anchor: Node) -> dict[str, Any]:
    type_ = body.type_of(anchor.inputs[1])
    form, (n, k) = weight_form(type_.dtype), (constant(d) for d in type_.shape[-2:])
    coded = form in ("fp8", "fp4")
    return {
        "weight": anchor.inputs[1],
        "format": form,
        "bits": _BITS[form],
        "parts": 3 if form == "f32" else 1,
        "row": padded(k) if coded else k,
        "code_bytes": code_bytes(type_.dtype, n, k) if coded else 0,
        "matrix_bytes": coded_bytes(type_.dtype, n, k) if coded else n * k * _BITS[form] // 8,
    }


def _outputs(body: Graph, nodes: Sequence[Node]) -> list[dict[str, Any]]:
    found = []
    for value in (v for _, v in body.outputs if v in {m.name for m in nodes}):
        ctype = storage(body.type_of(value).dtype).ctype
        found.append({"name": value, "type": ctype, "size": SIZES[ctype]})
    return found


def _memory(
    spec: KernelSpec, weights: Sequence[Mapping[str, Any]], outputs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Places in the unified buffer; `outputs` learn theirs."""
    tile = spec.schedule.values
    half, bk, rows = tile["bn"] // 2, tile["bk"], tile["bm"] // 2
    bits = max(w["bits"] for w in weights)
    stride = aligned(2 * half)  # a pair of scales for each row
    scale_at = aligned(half * bk * bits // 8)
    raw_bytes = scale_at + bk // 64 * stride
    dec_bytes = half * bk * 2
    sizes = {
        "raw": 2 * raw_bytes,
        "dec": 2 * dec_bytes,
        "acc": len(weights) * rows * tile["bn"] * 4,
    }
    sizes |= {f"out {o['name']}": rows * tile["bn"] * o["size"] for o in outputs}
    places = places_of(spec, sizes)
    for output in outputs:
        output["place"] = places[f"out {output['name']}"]
    return {
        "places": places, "raw_bytes": raw_bytes, "dec_bytes": dec_bytes,
        "scale_at": scale_at, "scale_stride": stride,
    }  # fmt: skip


def _epilogue(
    body: Graph, nodes: Sequence[Node], rows: Dim
) -> tuple[list[str], list[tuple[str, str]]]:
    """Statements of one element, and the tensors they read in global memory."""
    anchors = [n for n in nodes if op_def(n.op).kind is Kind.CONTRACT]
    known = {a.name: f"acc[{i}]" for i, a in enumerate(anchors)}
    index = (
        ("col",) if anchors[0].op == "linear" else (f"(row % {anchors[0].type.shape[1]})", "col")
    )
    outputs, operands = {value for _, value in body.outputs}, dict[str, str]()
    lines = []
    for node in nodes:
        if node.name not in known:
            lines.append(
                f"const float t_{node.name} = {_value(body, node, known, operands, rows, index)};"
            )
            known[node.name] = f"t_{node.name}"
        if node.name in outputs:
            stored = storage(node.type.dtype).store.format(known[node.name])
            lines.append(f"out_{node.name}[e] = {stored};")
    return lines, [(ctype, name) for name, ctype in operands.items()]


def _value(
    body: Graph, node: Node, known: Mapping[str, str], operands: dict[str, str], rows: Dim,
    index: tuple[str, ...],
) -> str:  # fmt: skip
    definition = op_def(node.op)
    if definition.kind is not Kind.ELEMENTWISE or definition.scalar is None:
        raise LowerError(f"{node.op} '{node.name}': is no epilogue: want an elementwise op")
    names = {}
    for place, value in enumerate(node.inputs):
        if value in known:
            names[f"operand{place}"] = known[value]
            continue
        type_ = body.type_of(value)
        shape = inner_shape(type_, node.type.rank, rows)
        at = offset(index[len(index) - len(shape) :] if shape else (), shape)
        if value not in body.weight and has_rows(type_, node.type.rank, rows):
            total = 1
            for extent in shape:
                total *= extent
            at = f"token * {total} + {at}"
        operands[value] = stored_as(body, value).ctype
        names[f"operand{place}"] = storage(type_.dtype).load.format(f"{value}[{at}]")
    return print_scalar(definition.scalar(node.attr, *map(Var, names)), names, "cpp")
