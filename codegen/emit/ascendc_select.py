"""Selection of entries as AscendC, on the vector cores.

TileLang's dialect has no form for rows that page tables name, nor for a list that grows.
"""

from __future__ import annotations

from tilewright.codegen.emit.ascendc_host import Launch, stored_as
from tilewright.codegen.emit.ascendc_latent import PagedRows, launch, names_of, paged_rows, row_cell
from tilewright.codegen.emit.ascendc_memory import UB_BYTES, aligned
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.spec import KernelSpec
from tilewright.graph.errors import LowerError

TILE = 128  # entries scored at once, cut to whole blocks


def select(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    body, name = spec.body, f"k_{spec.symbol}"
    (node,) = body.nodes
    q, w, keys, positions, request_rows, tables = node.inputs[:6]
    heads, width = (constant(d) for d in body.type_of(q).shape[1:])
    cell = row_cell(body.type_of(keys).dtype)
    rows = paged_rows(body, keys, tables, cell)
    k, blocks = int(str(node.attr["k"])), int(str(node.attr.get("blocks", 0)))
    block_size = int(str(node.attr.get("block_size", 1)))
    tile = max(1, TILE // block_size) * block_size
    within = node.inputs[6] if len(node.inputs) > 6 else ""
    given = constant(body.type_of(within).shape[1]) if within else 0
    held, weighed = (storage(body.type_of(n).dtype) for n in (q, w))
    room, block_room = k + 3 * tile, blocks + 3 * (tile // block_size) if blocks else 0
    sizes = {
        "q": heads * width * SIZES[held.ctype], "w": heads * SIZES[weighed.ctype],
        "raw": 0 if within else tile * rows.row_stride, "keys": tile * width * SIZES[cell],
        "parts": 4 * tile * heads, "held": 4 * room, "ids": 4 * room,
        "other": 4 * max(room, block_room), "other_ids": 4 * max(room, block_room),
        "kept": 4 * max(room, block_room, given), "out": 4 * k,
        "block_held": 4 * block_room, "block_ids": 4 * block_room, "block_out": 4 * blocks,
        "given": 4 * given, "sorted": 4 * given,
    }  # fmt: skip
    pointers = [(stored_as(body, n).ctype, n) for n in (q, w, keys)]
    pointers += [("int32_t", n) for n in (positions, request_rows, tables)]
    pointers += [("int32_t", n) for n in (within, node.name) if n]
    pointers = list(dict.fromkeys(pointers))
    extents = names_of(rows.stride)
    text = environment().get_template("ascendc/select.asc.j2").render(
        name=name, pointers=pointers, ints=extents, heads=heads, width=width, tile=tile,
        ratio=node.attr["ratio"], k=k, blocks=blocks, block_size=block_size, room=room,
        block_room=block_room, within={"list": within, "count": given} if within else None,
        rows=_in_global(rows) if within else rows, q=q, w=w, positions=positions,
        request_rows=request_rows, output=node.name, cell=cell,
        cell_load="{0}" if cell == "float" else "tw_bf16_to_f32({0})",
        q_load=held.load, q_type=held.ctype, q_bytes=SIZES[held.ctype],
        w_load=weighed.load, w_type=weighed.ctype, w_bytes=SIZES[weighed.ctype],
        offsets=_places(spec, sizes),
    )  # fmt: skip
    return [text], [launch(name, body, pointers, node.type.shape[0], extents)]


def _in_global(rows: PagedRows) -> PagedRows:
    """Rows that threads read where they lie."""
    from dataclasses import replace

    return replace(rows, decode=rows.decode.replace("__ubuf__", "__gm__"))


def _places(spec: KernelSpec, sizes: dict[str, int]) -> dict[str, int]:
    places, at = {}, 0
    for part, num_bytes in sizes.items():
        places[part] = at
        at += aligned(num_bytes)
    if at > UB_BYTES:
        raise LowerError(
            f"select kernel '{spec.symbol}': does not fit the unified buffer: got {at} bytes, "
            f"want at most {UB_BYTES}"
        )
    return places
