"""Contractions in the MX form of the matrix unit: e4m3 codes of both sides, ue8m0 scales for each
32 of K. The activation, which lies between kernels as the bf16 values of a quantiser, becomes codes
first; weights stay as they are stored, or become e4m3 codes on the vector cores where they are fp4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.codegen.emit.ascendc_contract import (
    Opening,
    Routes,
    Section,
    activation_bytes,
    list_bytes,
    weight_form,
)
from tilewright.codegen.emit.ascendc_host import Launch
from tilewright.codegen.emit.ascendc_memory import UB_BYTES, aligned, places_of
from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cpp_host import cpp_extent
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.pack_ascend import GROUP, padded
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, evaluate, product, to_json
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat, ElementType

MOST_ROWS = 16  # of one step of the encoding kernel


def refuses_mx(body: Graph) -> str | None:
    """Say why a contraction has no MX form: it wants scaled codes on both sides, each scale for a
    multiple of 32 of K."""
    for node in (n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT):
        for name in node.inputs[:2]:
            dtype = body.type_of(name).dtype
            if not _scaled_codes(dtype):
                return f"operand '{name}' is {dtype}, want codes with ue8m0 scales for 32 of k"
    return None


def _scaled_codes(dtype: ElementType) -> bool:
    return (
        isinstance(dtype, BlockFormat)
        and dtype.code.is_float
        and dtype.scale.name == "ue8m0"
        and dtype.block[1] % GROUP == 0
        and not dtype.tail
    )


def mx_scratch_bytes(body: Graph, bounds: Mapping[str, int], bm: int) -> int:
    """Bytes of workspace: the activation, its codes, its scales, lists of rows."""
    anchor = next(n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT)
    rows = evaluate(_code_rows(body, anchor), bounds)
    row = padded(constant(body.type_of(anchor.inputs[0]).shape[-1]))
    codes = rows * row + -(-rows * row // GROUP // 64) * 64
    return activation_bytes(body, anchor, bounds) + codes + list_bytes(body, bounds, bm)


def _code_rows(body: Graph, anchor: Node) -> Dim:
    """Rows of codes: one for each row of the activation, of experts one for each slot."""
    routes = Routes.of(body, anchor)
    if routes.kind == "experts":
        return anchor.type.shape[0] * routes.slots
    return product(body.type_of(anchor.inputs[0]).shape[:-1])


def contract_mx(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return device texts and their launches in order."""
    opening = Opening.of(spec)
    anchor = opening.anchors[0]
    row = padded(constant(spec.body.type_of(anchor.inputs[0]).shape[-1]))
    count = f"({cpp_extent(to_json(_code_rows(spec.body, anchor)))})"
    scales = f"({opening.start}) + (int64_t){count} * {row}"
    end = f"{scales} + ((int64_t){count} * {row // GROUP} + 63) / 64 * 64"
    at = "(uint8_t*)workspace->data + "
    places = {
        "activation": "workspace->data",
        "codes": f"({at}{opening.start})",
        "scales": f"({at}{scales})",
        "order": f"(int32_t*)({at}{end})",
    }
    texts, launches = opening.launches(places["order"])
    text, launch = _encode(opening, row, count, places)
    texts.append(text)
    launches.append(launch)
    for section in opening.sections():
        text, launch = _section(section, row, places)
        texts.append(text)
        launches.append(launch)
    return texts, launches


def _encode(
    opening: Opening, row: int, count: str, places: Mapping[str, str]
) -> tuple[str, Launch]:
    spec, routes = opening.spec, opening.routes
    value, name = opening.anchors[0].inputs[0], f"k_{opening.spec.symbol}_encode"
    x = "activation" if value in spec.body.node else value
    k = constant(spec.body.type_of(value).shape[-1])
    order = "order" if routes.kind == "experts" else ""
    sizes = {"rows": aligned(2 * row), "codes": row, "scales": row // GROUP}
    tile = MOST_ROWS
    while tile > 1 and 2 * sum(aligned(tile * size) for size in sizes.values()) > UB_BYTES:
        tile //= 2
    stages = {part: aligned(tile * size) for part, size in sizes.items()}
    text = environment().get_template("ascendc/encode.asc.j2").render(
        name=name, x=x, k=k, row=row, tile=tile, order=order, in_row=sizes["rows"],
        slots=routes.slots if routes.shared else 1, in_bytes=stages["rows"],
        code_bytes=stages["codes"], scale_bytes=stages["scales"],
        places=places_of(spec, {part: 2 * size for part, size in stages.items()}),
    )  # fmt: skip
    pointers = [("uint16_t", x), ("uint8_t", "codes"), ("uint8_t", "scales")]
    pointers += [("int32_t", order)] if order else []
    given = [f"({t}*){places.get(p, f'{p}->data')}" for t, p in pointers]
    return text, Launch(name, "vector", f"{name}({', '.join([*given, f'(int32_t){count}'])})")


def _section(section: Section, k: int, places: Mapping[str, str]) -> tuple[str, Launch]:
    weights, outputs = section.weights(), section.outputs()
    for weight in weights:
        weight["direct"] = weight["format"] == "fp8"
    tile = section.spec.schedule.values
    memory = _memory(section.spec, weights, outputs)
    text, pointers = section.render(
        "ascendc/contract_mx.asc.j2", [("uint8_t", "codes"), ("uint8_t", "scales")], k=k,
        anchors=weights, outputs=outputs, at=_l1_places(weights, tile),
        x_apart=section.routes.slots if section.routes.kind == "groups" else 1, **memory,
    )  # fmt: skip
    return text, section.launch(pointers, places)


def _memory(
    spec: KernelSpec, weights: list[dict[str, Any]], outputs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Places in the unified buffer; `outputs` learn theirs."""
    tile = spec.schedule.values
    half, rows = tile["bn"] // 2, tile["bm"] // 2
    decoded = 0 if all(w["direct"] for w in weights) else half * tile["bk"]
    sizes = {"raw": decoded, "dec": 2 * decoded, "acc": len(weights) * rows * tile["bn"] * 4}
    sizes |= {f"out {o['name']}": rows * tile["bn"] * o["size"] for o in outputs}
    places = places_of(spec, sizes)
    for output in outputs:
        output["place"] = places[f"out {output['name']}"]
    return {"places": places, "raw_bytes": decoded // 2, "dec_bytes": decoded}


def _l1_places(weights: list[dict[str, Any]], tile: Mapping[str, int]) -> dict[str, int]:
    """Places in L1 of two stages each, and their `end`."""
    x, w = 2 * tile["bm"] * tile["bk"], 2 * tile["bn"] * tile["bk"]
    sizes = {
        "x": x,
        "x_scales": x // GROUP,
        "w": w if any(weight["direct"] for weight in weights) else 0,
        "decoded": 0 if all(weight["direct"] for weight in weights) else w,
        "w_scales": w // GROUP,
    }
    places, at = {}, 0
    for part, size in sizes.items():
        places[part] = at
        at += size
    return {**places, "end": at}


def mx_bits(body: Graph) -> tuple[int, bool]:
    """Bits of the widest weight's codes, and whether some are decoded: what a tile depends on."""
    forms = {
        weight_form(body.type_of(n.inputs[1]).dtype)
        for n in body.nodes
        if op_def(n.op).kind is Kind.CONTRACT
    }
    return (8 if "fp8" in forms else 4), "fp4" in forms
