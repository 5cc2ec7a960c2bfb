"""Selection of entries as AscendC, on the vector cores.

TileLang's dialect has no form for rows that page tables name, nor for a list that grows.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.emit.ascendc_host import Launch, stored_as
from tilewright.codegen.emit.ascendc_latent import PagedRows, launch, names_of, paged_rows, row_cell
from tilewright.codegen.emit.ascendc_memory import places_of
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node

TILE = 128  # entries scored at once, cut to whole blocks


def select(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    body, name = spec.body, f"k_{spec.symbol}"
    (node,) = body.nodes
    q, w, keys, positions, request_rows, tables = node.inputs[:6]
    within = node.inputs[6] if len(node.inputs) > 6 else ""
    rows = paged_rows(body, keys, tables, row_cell(body.type_of(keys).dtype))
    held, weighed = (storage(body.type_of(n).dtype) for n in (q, w))
    pointers = [(stored_as(body, n).ctype, n) for n in (q, w, keys)]
    ints = (positions, request_rows, tables, within, node.name)
    pointers = list(dict.fromkeys([*pointers, *(("int32_t", n) for n in ints if n)]))
    extents = names_of(rows.stride)
    facts = _facts(body, node, within)
    offsets = places_of(spec, _sizes(facts, rows, held.ctype, weighed.ctype))
    text = environment().get_template("ascendc/select.asc.j2").render(
        name=name, pointers=pointers, ints=extents, ratio=node.attr["ratio"],
        within={"list": within, "count": facts["given"]} if within else None,
        rows=_in_global(rows) if within else rows, q=q, w=w, positions=positions,
        request_rows=request_rows, output=node.name, cell=rows.cell,
        cell_load="{0}" if rows.cell == "float" else "tw_bf16_to_f32({0})",
        q_load=held.load, q_type=held.ctype, q_bytes=SIZES[held.ctype],
        w_load=weighed.load, w_type=weighed.ctype, w_bytes=SIZES[weighed.ctype],
        offsets=offsets, **facts,
    )  # fmt: skip
    return [text], [launch(name, body, pointers, node.type.shape[0], extents)]


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
