"""Latent attention as AscendC, on the vector cores, and how rows of paged states are decoded there.

TileLang's dialect has no form for rows that page tables or lists name, so it is written directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.codegen.emit.ascendc_attend import attend_epilogue
from tilewright.codegen.emit.ascendc_host import Launch, stored_as
from tilewright.codegen.emit.ascendc_memory import UB_BYTES, aligned
from tilewright.codegen.emit.ascendc_quant import format_name
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.emit.cpp import environment, print_scalar_const
from tilewright.codegen.emit.cpp_host import cpp_extent
from tilewright.codegen.emit.cpp_types import Storage, storage
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat, ElementType, TensorType

LISTS = {"attend_window": "none", "attend_compressed": "all", "attend_selected": "selected"}


@dataclass(frozen=True)
class PagedRows:
    """Rows of a paged state: bytes of one, where it stands in the buffer, and its element `d`."""

    state: str
    tables: str
    stride: str
    per_page: int
    row_bytes: int
    row_stride: int
    decode: str
    cell: str
    name: str = ""


def row_cell(*dtypes: ElementType) -> str:
    """Return the type that holds elements of all these exactly: fp32 where one is, else bf16."""
    return "float" if any(str(d) == "f32" for d in dtypes) else "uint16_t"


def decode_text(dtype: ElementType, width: int, cell: str) -> str:
    """Statements that leave element `d` of the bytes at `row` in `value`, of type `cell`.

    Products of codes and scales are exact in bf16: at most six bits.
    """
    if not isinstance(dtype, BlockFormat):
        ctype = storage(dtype).ctype
        loaded = f"((__ubuf__ {ctype}*)row)[d]"
        text = loaded if ctype == cell else storage(dtype).load.format(loaded)
        return f"    const {cell} value = {text};"
    format_name(dtype)
    coded, bits, group = width - dtype.tail, dtype.code.bits, dtype.block[1]
    code_bytes = -(-coded * bits // 8)
    code = "row[d]" if bits == 8 else "(row[d / 2] >> d % 2 * 4 & 15)"
    unit = "tw_e4m3_value" if bits == 8 else "tw_e2m1_value"
    scale_of = "tw_e4m3_value" if dtype.scale.name == "fp8_e4m3" else "tw_ue8m0_value"
    scale = f"{scale_of}(row[{code_bytes + 2 * dtype.tail} + d / {group}])"
    product = f"tw_mul({unit}({code}), {scale})"
    held = product if cell == "float" else f"(uint16_t)((uint32_t)tw_bits({product}) >> 16)"
    if not dtype.tail:
        return f"    const {cell} value = {held};"
    tail = f"((__ubuf__ uint16_t*)(row + {code_bytes}))[d - {coded}]"
    tail = f"tw_bf16_to_f32({tail})" if cell == "float" else tail
    return f"    {cell} value;\n    if (d < {coded}) value = {held};\n    else value = {tail};"


def paged_rows(body: Graph, state: str, tables: str, cell: str, *, name: str = "") -> PagedRows:
    """Return how rows of a state lie."""
    type_ = body.type_of(state)
    width, row_bytes = constant(type_.shape[2]), row_bytes_of(type_)
    return PagedRows(
        state, tables, extent_name(body.type_of(tables).shape[1]), constant(type_.shape[1]),
        row_bytes, aligned(row_bytes), decode_text(type_.dtype, width, cell), cell, name,
    )  # fmt: skip


def row_bytes_of(state: TensorType) -> int:
    """Bytes of one row of a state."""
    width = constant(state.shape[2])
    if isinstance(state.dtype, BlockFormat):
        return state.dtype.row_bytes(width)
    return width * SIZES[storage(state.dtype).ctype]


def extent_name(extent: Dim) -> str:
    tree = to_json(extent)
    if isinstance(tree, list):
        raise LowerError(f"extent {tree}: has no AscendC form: want a name or a number")
    return str(tree)


def names_of(*extents: str) -> list[str]:
    """The run-time numbers among extents, each once."""
    return [e for e in dict.fromkeys(extents) if not e.isdigit()]


@dataclass(frozen=True)
class Latent:
    """One attention whose keys are its values: its operands, and how rows lie."""

    body: Graph
    anchor: Node
    lists: tuple[PagedRows, ...]
    cell: str

    @classmethod
    def of(cls, body: Graph) -> Latent:
        anchor = next(n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND)
        window, window_tables, more = anchor.inputs[1], anchor.inputs[4], anchor.inputs[6:]
        cell = row_cell(*(body.type_of(s).dtype for s in (window, *more[:1])))
        lists = [paged_rows(body, window, window_tables, cell, name="window")]
        if more:
            lists.append(paged_rows(body, more[0], more[1], cell, name="entries"))
        return cls(body, anchor, tuple(lists), cell)

    @property
    def heads(self) -> int:
        return constant(self.anchor.type.shape[1])

    @property
    def width(self) -> int:
        return constant(self.anchor.type.shape[2])

    @property
    def out(self) -> str:
        ((_, value),) = self.body.outputs
        return value

    @property
    def selected(self) -> str:
        more = self.anchor.inputs[6:]
        return more[2] if len(more) > 2 else ""

    @property
    def num_selected(self) -> str:
        if not self.selected:
            return "0"
        return extent_name(self.body.type_of(self.selected).shape[1])

    @property
    def pointers(self) -> list[tuple[str, str]]:
        body, (q, window, positions, rows, tables, sink) = self.body, self.anchor.inputs[:6]
        more = self.anchor.inputs[6:]
        found = [(stored_as(body, n).ctype, n) for n in (q, window, *more[:1])]
        found += [("int32_t", n) for n in (positions, rows, tables, *more[1:])]
        found += [(storage(body.type_of(n).dtype).ctype, n) for n in (sink, self.out)]
        return list(dict.fromkeys(found))

    def stored(self, value: str) -> Storage:
        return storage(self.body.type_of(value).dtype)

    def render(
        self, symbol: str, template: str, kind: str = "vector", **sizes: Any
    ) -> tuple[list[str], list[Launch]]:
        """Return the device text and its launch; `kind` of cores, `sizes` of the template."""
        body, anchor, name = self.body, self.anchor, f"k_{symbol}"
        q, _, positions, rows, _, sink = anchor.inputs[:6]
        of_sink, made = self.stored(sink), self.stored(self.out)
        extents = names_of(*(row.stride for row in self.lists), self.num_selected)
        text = environment().get_template(template).render(
            name=name, pointers=self.pointers, ints=extents, heads=self.heads, width=self.width,
            window=anchor.attr["window"], ratio=anchor.attr.get("ratio", 1),
            entries=LISTS[anchor.op], num_selected=self.num_selected, lists=self.lists, q=q,
            positions=positions, request_rows=rows, sink=sink, out=self.out,
            selected=self.selected, sink_load=of_sink.load, sink_type=of_sink.ctype,
            out_type=made.ctype, out_bytes=SIZES[made.ctype],
            scale=print_scalar_const(float(str(anchor.attr["scale"]))),
            epilogue=attend_epilogue(body, anchor, self.out), **sizes,
        )  # fmt: skip
        return [text], [launch(name, body, self.pointers, anchor.type.shape[0], extents, kind)]


def latent(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    found = Latent.of(spec.body)
    held, made = found.stored(found.anchor.inputs[0]), found.stored(found.out)
    cell, lists = found.cell, list(found.lists)
    group, tile, offsets = _fit(
        spec, found.heads, found.width, cell, lists, held.ctype, made.ctype
    )
    return found.render(
        spec.symbol, "ascendc/latent.asc.j2", group=group, tile=tile, offsets=offsets, cell=cell,
        q_load=held.load, q_type=held.ctype, q_bytes=SIZES[held.ctype],
        cell_load="{0}" if cell == "float" else "tw_bf16_to_f32({0})",
    )  # fmt: skip


def launch(
    name: str, body: Graph, pointers: list[tuple[str, str]], tokens: Dim, extents: list[str],
    kind: str = "vector",
) -> Launch:  # fmt: skip
    """Return the call of a kernel over tokens: pointers, their number, further extents."""
    given = [f"({ctype}*){tensor}->data" for ctype, tensor in pointers]
    ints = [f"(int32_t)({text})" for text in (cpp_extent(to_json(tokens)), *extents)]
    return Launch(name, kind, f"{name}({', '.join([*given, *ints])})")


def _fit(
    spec: KernelSpec, heads: int, width: int, cell: str, lists: list[PagedRows], q_type: str,
    out_type: str,
) -> tuple[int, int, dict[str, int]]:  # fmt: skip
    """Choose heads an item and entries a tile, from the shape alone: a tile of a whole chunk
    first, then the most heads."""
    tile = spec.numerics.chunk
    while tile >= 16:
        group = heads
        while group >= 1:
            sizes = {
                "q": group * width * SIZES[q_type],
                "raw": tile * max(row.row_stride for row in lists),
                "rows": tile * width * SIZES[cell],
                "scores": group * tile * 4,
                "sums": group * width * 4,
                "state": group * 12,
                "out": group * width * SIZES[out_type],
            }
            total = sum(map(aligned, sizes.values()))
            enough = group >= min(heads, 8) or tile == 16
            if total <= UB_BYTES and heads % group == 0 and enough:
                offsets, at = {}, 0
                for part, num_bytes in sizes.items():
                    offsets[part] = at
                    at += aligned(num_bytes)
                return group, tile, offsets
            group -= 1
        tile //= 2
    raise LowerError(
        f"attend kernel '{spec.symbol}': rows of {width} do not fit the unified buffer: want at "
        f"most {UB_BYTES} bytes for 16 of them"
    )
