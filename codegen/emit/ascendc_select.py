"""Selection of entries as AscendC: scores from the matrix unit, or all of it on the vector cores.

TileLang's dialect has no form for rows that page tables name, nor for a list that grows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilewright.codegen.emit.ascendc_cube import FRACTAL, L0_BYTES, L0C_BYTES
from tilewright.codegen.emit.ascendc_host import Launch, stored_as
from tilewright.codegen.emit.ascendc_latent import PagedRows, launch, names_of, paged_rows, row_cell
from tilewright.codegen.emit.ascendc_memory import UB_BYTES, stacked, stacked_bytes
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cpp_types import Storage, storage
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node

TILES = (128, 64, 32, 16)  # entries scored at once, cut to whole blocks: the first that fits
Parts = dict[str, int]  # bytes of the parts of a unified buffer


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
    def k(self) -> int:
        return int(str(self.node.attr["k"]))

    def stored(self, place: int) -> Storage:
        return storage(self.body.type_of(self.node.inputs[place]).dtype)

    def render(
        self, symbol: str, template: str, kind: str, facts: Parts, **more: Any
    ) -> tuple[list[str], list[Launch]]:
        """Return the device text and its launch; `kind` of cores, places of the template."""
        body, node, name = self.body, self.node, f"k_{symbol}"
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


Measure = Callable[[Selection, Parts], tuple[Parts, ...]]


def refuses(body: Graph) -> str | None:
    """Say why a selection does not go to the vector cores: its lists must fit."""
    return _refuses_lists(Selection.of(body), _vector_parts)


def select(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    found = Selection.of(spec.body)
    held, cell = found.stored(0), found.rows.cell
    facts = _tiled(found, found.k, _vector_parts)
    assert facts, spec.symbol
    return found.render(
        spec.symbol, "ascendc/select.asc.j2", "vector", facts, cell=cell,
        cell_load="{0}" if cell == "float" else "tw_bf16_to_f32({0})",
        q_load=held.load, q_type=held.ctype, q_bytes=SIZES[held.ctype],
        offsets=stacked(*_vector_parts(found, facts)),
    )  # fmt: skip


def _vector_parts(found: Selection, facts: Parts) -> tuple[Parts, ...]:
    heads, width, tile = (facts[n] for n in ("heads", "width", "tile"))
    raw = 0 if found.within else tile * found.rows.row_stride
    parts = {
        "q": heads * width * SIZES[found.stored(0).ctype], "raw": raw,
        "keys": tile * width * SIZES[found.rows.cell], "parts": 4 * tile * heads,
    }  # fmt: skip
    return ({**parts, **_lists(found, facts)},)


# --- scores from the matrix unit ----------------------------------------------------------------


def refuses_cube(body: Graph) -> str | None:
    """Say why scores do not come from the matrix unit: it takes bf16 on both sides, rows of whole
    fractals, all queries of a token at once."""
    found = Selection.of(body)
    if found.stored(0).ctype != "uint16_t" or found.rows.cell != "uint16_t":
        return "keys or queries are f32, want bf16 or codes"
    facts = _facts(found, found.k, TILES[0])
    width, m, rows = facts["width"], _filled(facts["heads"]), _filled(facts["tile"])
    if width % FRACTAL:
        return f"keys have {width} values, want a multiple of {FRACTAL}"
    l0c = 2 * m * rows * 4
    if max(m * width * 2, 2 * rows * width * 2) > L0_BYTES or l0c > L0C_BYTES:
        return f"{facts['heads']} heads of {width} do not fit the memories"
    return _refuses_lists(found, _cube_parts)


def select_cube(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    found = Selection.of(spec.body)
    facts = _tiled(found, found.k, _cube_parts)
    assert facts, spec.symbol
    m, lists, keys = _filled(facts["heads"]), *_cube_parts(found, facts)
    return found.render(
        spec.symbol, "ascendc/select_cube.asc.j2", "mix", facts, m=m,
        tile_rows=_filled(facts["tile"]), at={"q": 0, "keys": m * facts["width"] * 2},
        offsets=stacked(lists), key_offsets=stacked(keys),
    )  # fmt: skip


def _cube_parts(found: Selection, facts: Parts) -> tuple[Parts, ...]:
    """Of the vector core that keeps the list, of the one that decodes keys."""
    rows, given = _filled(facts["tile"]), facts["given"]
    raw = 0 if given else facts["tile"] * found.rows.row_stride
    keys = {"raw": raw, "keys": rows * facts["width"] * 2, "given": 4 * given,
            "sorted": 4 * given, "kept": 4 * given}  # fmt: skip
    products = {"products": 2 * _filled(facts["heads"]) * rows * 4}
    return {**products, **_lists(found, facts)}, keys


def _filled(count: int) -> int:
    return -(-count // FRACTAL) * FRACTAL


# --- sizes --------------------------------------------------------------------------------------


def _refuses_lists(found: Selection, parts: Measure) -> str | None:
    """Say how many entries could be selected, if what is asked for does not fit."""
    if _tiled(found, found.k, parts):
        return None
    most = bisect_left(range(found.k), True, key=lambda k: _tiled(found, k, parts) is None) - 1
    what = f"a list of {found.k} entries does not fit the unified buffer"
    return f"{what}: want k of at most {most}" if most > 0 else f"{what}, nor does any other"


def _tiled(found: Selection, k: int, parts: Measure) -> Parts | None:
    """Return the numbers of a selection with the largest tile that fits."""
    for most in TILES:
        facts = _facts(found, k, most)
        if all(stacked_bytes(each) <= UB_BYTES for each in parts(found, facts)):
            return facts
    return None


def _facts(found: Selection, k: int, most: int) -> Parts:
    """Numbers of a selection: its shape, entries scored at once, room of the growing lists."""
    body, node = found.body, found.node
    heads, width = (constant(d) for d in body.type_of(node.inputs[0]).shape[1:])
    blocks = int(str(node.attr.get("blocks", 0)))
    block_size = int(str(node.attr.get("block_size", 1)))
    tile = max(1, most // block_size) * block_size
    return {
        "heads": heads, "width": width, "k": k, "blocks": blocks, "block_size": block_size,
        "tile": tile, "room": k + 3 * tile,
        "block_room": blocks + 3 * (tile // block_size) if blocks else 0,
        "given": constant(body.type_of(found.within).shape[1]) if found.within else 0,
    }  # fmt: skip


def _lists(found: Selection, facts: Parts) -> Parts:
    """Weights of heads and lists, in bytes."""
    given, room, block_room = (facts[n] for n in ("given", "room", "block_room"))
    most = max(room, block_room)
    return {
        "w": facts["heads"] * SIZES[found.stored(1).ctype], "held": 4 * room, "ids": 4 * room,
        "other": 4 * most, "other_ids": 4 * most, "kept": 4 * max(most, given),
        "out": 4 * facts["k"], "block_held": 4 * block_room, "block_ids": 4 * block_room,
        "block_out": 4 * facts["blocks"], "given": 4 * given, "sorted": 4 * given,
    }  # fmt: skip


def _in_global(rows: PagedRows) -> PagedRows:
    """Rows that threads read where they lie."""
    return replace(rows, decode=rows.decode.replace("__ubuf__", "__gm__"))
