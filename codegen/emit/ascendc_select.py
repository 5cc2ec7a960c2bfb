"""Selection of entries as AscendC: scores from the matrix unit, or all of it on the vector cores.

TileLang's dialect has no form for rows that page tables name, nor for a list that grows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilewright.codegen.emit.ascendc_cube import FRACTAL, L0_BYTES, L0C_BYTES
from tilewright.codegen.emit.ascendc_host import Launch, stored_as
from tilewright.codegen.emit.ascendc_latent import PagedRows, launch, names_of, paged_rows, row_cell
from tilewright.codegen.emit.ascendc_memory import places_of
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cpp_types import Storage, storage
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node

TILE = 128  # entries scored at once, cut to whole blocks


@dataclass(frozen=True)
class Selection:
    """One selection: its operands and how keys lie."""

    body: Graph
    node: Node
    rows: PagedRows

    @classmethod
    def of(cls, body: Graph) -> Selection:
        (node,) = body.nodes
        keys, tables = node.inputs[2], node.inputs[5]
        cell = row_cell(body.type_of(keys).dtype)
        return cls(body, node, paged_rows(body, keys, tables, cell))

    @property
    def within(self) -> str:
        """The list of candidate blocks, if there is one."""
        return self.node.inputs[6] if len(self.node.inputs) > 6 else ""

    @property
    def facts(self) -> dict[str, int]:
        return _facts(self.body, self.node, self.within)

    def stored(self, place: int) -> Storage:
        return storage(self.body.type_of(self.node.inputs[place]).dtype)

    def render(
        self, symbol: str, template: str, kind: str, **more: Any
    ) -> tuple[list[str], list[Launch]]:
        """Return the device text and its launch; `kind` of cores, places of the template."""
        body, node, name, facts = self.body, self.node, f"k_{symbol}", self.facts
        q, w, keys, positions, request_rows, tables = node.inputs[:6]
        pointers = [(stored_as(body, n).ctype, n) for n in (q, w, keys)]
        ints = (positions, request_rows, tables, self.within, node.name)
        pointers = list(dict.fromkeys([*pointers, *(("int32_t", n) for n in ints if n)]))
        extents, weighed = names_of(self.rows.stride), self.stored(1)
        within = {"list": self.within, "count": facts["given"]} if self.within else None
        text = environment().get_template(template).render(
            name=name, pointers=pointers, ints=extents, ratio=node.attr["ratio"], within=within,
            rows=_in_global(self.rows) if within else self.rows, q=q, w=w, positions=positions,
            request_rows=request_rows, output=node.name, w_load=weighed.load,
            w_type=weighed.ctype, w_bytes=SIZES[weighed.ctype], **facts, **more,
        )  # fmt: skip
        return [text], [launch(name, body, pointers, node.type.shape[0], extents, kind)]


def select(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    found = Selection.of(spec.body)
    held, weighed, cell = found.stored(0), found.stored(1), found.rows.cell
    return found.render(
        spec.symbol, "ascendc/select.asc.j2", "vector", cell=cell,
        cell_load="{0}" if cell == "float" else "tw_bf16_to_f32({0})",
        q_load=held.load, q_type=held.ctype, q_bytes=SIZES[held.ctype],
        offsets=places_of(spec, _sizes(found.facts, found.rows, held.ctype, weighed.ctype)),
    )  # fmt: skip


# --- scores from the matrix unit ----------------------------------------------------------------


def refuses_cube(body: Graph) -> str | None:
    """Say why scores do not come from the matrix unit: it takes bf16 on both sides, rows of whole
    fractals, all queries of a token at once."""
    found = Selection.of(body)
    if found.stored(0).ctype != "uint16_t" or found.rows.cell != "uint16_t":
        return "keys or queries are f32, want bf16 or codes"
    width, m, rows = found.facts["width"], _filled(found.facts["heads"]), _tile_rows(found)
    if width % FRACTAL:
        return f"keys have {width} values, want a multiple of {FRACTAL}"
    l0c = 2 * m * rows * 4
    if max(m * width * 2, 2 * rows * width * 2) > L0_BYTES or l0c > L0C_BYTES:
        return f"{found.facts['heads']} heads of {width} do not fit the memories"
    return None


def select_cube(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    found = Selection.of(spec.body)
    facts, weighed, m = found.facts, found.stored(1), _filled(found.facts["heads"])
    rows, given, width = _tile_rows(found), found.facts["given"], found.facts["width"]
    sizes = _sizes(facts, found.rows, "uint16_t", weighed.ctype)
    products = {"products": 2 * m * rows * 4}
    lists = {n: size for n, size in sizes.items() if n not in ("q", "raw", "keys", "parts")}
    raw = 0 if given else facts["tile"] * found.rows.row_stride
    keys = {"raw": raw, "keys": rows * width * 2, "given": 4 * given, "sorted": 4 * given,
            "kept": 4 * given}  # fmt: skip
    return found.render(
        spec.symbol, "ascendc/select_cube.asc.j2", "mix", m=m, tile_rows=rows,
        at={"q": 0, "keys": m * width * 2}, offsets=places_of(spec, {**products, **lists}),
        key_offsets=places_of(spec, keys),
    )  # fmt: skip


def _filled(count: int) -> int:
    return -(-count // FRACTAL) * FRACTAL


def _tile_rows(found: Selection) -> int:
    return _filled(found.facts["tile"])


# --- sizes --------------------------------------------------------------------------------------


def _facts(body: Graph, node: Node, within: str) -> dict[str, int]:
    """Numbers of a selection: its shape, entries scored at once, room of the growing lists."""
    heads, width = (constant(d) for d in body.type_of(node.inputs[0]).shape[1:])
    k, blocks = int(str(node.attr["k"])), int(str(node.attr.get("blocks", 0)))
    block_size = int(str(node.attr.get("block_size", 1)))
    tile = max(1, TILE // block_size) * block_size
    return {
        "heads": heads, "width": width, "k": k, "blocks": blocks, "block_size": block_size,
        "tile": tile, "room": k + 3 * tile,
        "block_room": blocks + 3 * (tile // block_size) if blocks else 0,
        "given": constant(body.type_of(within).shape[1]) if within else 0,
    }  # fmt: skip


def _sizes(facts: dict[str, int], rows: PagedRows, q_type: str, w_type: str) -> dict[str, int]:
    """Bytes of each part of the unified buffer."""
    heads, width, tile, given = (facts[n] for n in ("heads", "width", "tile", "given"))
    room, block_room = facts["room"], facts["block_room"]
    most = max(room, block_room)
    return {
        "q": heads * width * SIZES[q_type], "w": heads * SIZES[w_type],
        "raw": 0 if given else tile * rows.row_stride, "keys": tile * width * SIZES[rows.cell],
        "parts": 4 * tile * heads, "held": 4 * room, "ids": 4 * room, "other": 4 * most,
        "other_ids": 4 * most, "kept": 4 * max(most, given), "out": 4 * facts["k"],
        "block_held": 4 * block_room, "block_ids": 4 * block_room,
        "block_out": 4 * facts["blocks"], "given": 4 * given, "sorted": 4 * given,
    }  # fmt: skip


def _in_global(rows: PagedRows) -> PagedRows:
    """Rows that threads read where they lie."""
    return replace(rows, decode=rows.decode.replace("__ubuf__", "__gm__"))
