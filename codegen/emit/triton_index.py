"""Texts of the Triton template of the selection of entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import (
    Launch,
    Pointer,
    host_text,
    launch_table,
    parameters,
    workspace_pointers,
)
from tilewright.codegen.emit.triton_paged import (
    COLUMNS,
    LEAST,
    decoded,
    product_type,
    row_cells,
    slices_of,
)
from tilewright.codegen.emit.triton_rows import power_of_two
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Node
from tilewright.graph.dims import DimJson, to_json


@dataclass(frozen=True)
class Stream:
    """One choice: the k largest of what passes, in a buffer of `capacity`, a power of two."""

    name: str
    k: int
    padded: int
    capacity: int
    offset: int


def streams_of(node: Node, tile: int) -> tuple[Stream, ...]:
    """Return the choices of a selection: of entries and, where they are asked for, of blocks."""
    k, blocks = (int(str(node.attr.get(name, 0))) for name in ("k", "blocks"))
    found = [_stream("best", k, 0, tile)]
    if blocks:
        found.append(_stream("blocks", blocks, k, tile))
    return tuple(found)


def _stream(name: str, k: int, offset: int, tile: int) -> Stream:
    padded = max(LEAST, power_of_two(k))
    # Room for as many again: the longer the buffer, the rarer it is cut.
    return Stream(name, k, padded, power_of_two(k + padded + tile), offset)


def selection_parts(
    node: Node, schedule: Schedule, tokens: DimJson, listed: int
) -> dict[str, tuple[str, DimJson]]:
    """Return the buffers of the workspace: Triton type and bytes."""
    values, found = schedule.values, dict[str, tuple[str, DimJson]]()
    for s in streams_of(node, values["tile"]):
        held: DimJson = ["mul", tokens, 4 * values["parts"] * s.capacity]
        found[f"{s.name}_keys"] = found[f"{s.name}_ids"] = ("i32", held)
        if values["parts"] > 1:
            joined: DimJson = ["mul", tokens, 4 * s.capacity]
            found[f"{s.name}_joined_keys"] = found[f"{s.name}_joined_ids"] = ("i32", joined)
            found[f"{s.name}_held"] = ("i32", ["mul", tokens, 4 * values["parts"]])
    if listed:
        found["listed"] = ("i32", ["mul", tokens, 4 * power_of_two(listed)])
        found["num_listed"] = ("i32", ["mul", tokens, 4])
    return found


def selection(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the template's variables."""
    body, tile = spec.body, spec.schedule.values["tile"]
    (node,) = body.nodes
    q, w, keys, positions, rows, tables = node.inputs[:6]
    heads, width = (constant(d) for d in body.type_of(q).shape[1:])
    stored = body.type_of(keys)
    cut = slices_of(width, [stored.dtype], COLUMNS)
    cast = product_type([body.type_of(q).dtype, stored.dtype])
    lanes = max(LEAST, power_of_two(heads))
    given = constant(body.type_of(node.inputs[6]).shape[1]) if len(node.inputs) > 6 else 0
    launches, scratch = _launches(spec, node, given)
    return {
        "parameters": parameters(spec, launches[0]),
        "heads": heads,
        "lanes": lanes,
        "halves": [lanes >> i for i in range(1, lanes.bit_length())],
        "width": width,
        "ratio": int(str(node.attr["ratio"])),
        "tile": tile,
        "parts": spec.schedule.values["parts"],
        "block_size": int(str(node.attr.get("block_size", 1))),
        "slices": cut,
        "decoded": decoded(keys, "start", "seen", stored.dtype, width, cut),
        "cells": row_cells(stored.dtype, width),
        "streams": streams_of(node, tile),
        "out": node.name,
        "out_width": constant(node.type.shape[1]),
        "q": q,
        "w": w,
        "positions": positions,
        "request_rows": rows,
        "tables": tables,
        "stride": to_json(body.type_of(tables).shape[1]),
        "per_page": constant(stored.shape[1]),
        "candidates": node.inputs[6] if given else None,
        "listed": given,
        "listed_padded": power_of_two(given),
        "cast": cast,
        "precision": ', input_precision="ieee"' if cast == "float32" else "",
        "launches": launch_table(spec, launches),
        "host": host_text(spec, launches, scratch),
    }


def _launches(spec: KernelSpec, node: Node, listed: int) -> tuple[list[Launch], DimJson]:
    schedule, tokens = spec.schedule.values, to_json(node.type.shape[0])
    parts, warps = schedule["parts"], schedule["warps"]
    work, scratch = workspace_pointers(selection_parts(node, spec.schedule, tokens, listed))

    def launch(kernel: str, programs: int, stages: int, pointers: tuple[Pointer, ...]) -> Launch:
        return Launch(kernel, (tokens, programs, 1), warps, stages, pointers)

    found = [launch("choose", parts, schedule["stages"], work)]
    if listed:
        found.insert(0, launch("list_candidates", 1, 1, work))
    if parts > 1:
        found.append(launch("join", 1, 1, work))
    return found, scratch
