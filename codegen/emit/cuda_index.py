"""Texts of the CUDA template of the selection of entries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.codegen.arguments import int_names
from tilewright.codegen.emit.cpp_host import cpp_extent
from tilewright.codegen.emit.cuda_latent import parameter
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import Pointer, host_text, pointers, workspace_pointers
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson, to_json

WIDTH, ROW_BYTES = 128, 68
# Of the 16 warps that score: eight tiles of 16 rows, a barrier and up to four places of each.
STREAM_BYTES = 16 * 8 * (16 * ROW_BYTES + 8 + 16)
MOST_LISTED = 4096  # of TW_LISTED
CHOICE_BYTES = 4 * (2 * MOST_LISTED + 20 * 32 + 2 * 2 * 32 + 20 + 1)


def index_parts(
    node: Node, schedule: Schedule, limit: DimJson, listed: int
) -> dict[str, tuple[str, DimJson]]:
    """Return the buffers of the workspace: Triton type and bytes. `limit`: entries of a token."""
    slab = schedule.values["slab"]
    found: dict[str, tuple[str, DimJson]] = {"score_keys": ("i32", ["mul", limit, 4 * slab])}
    if listed:
        found["block_lists"] = ("i32", 4 * slab * listed)
        found["num_listed"] = ("i32", 4 * slab)
    return found


def entries_of(spec_body: Any, node: Node) -> DimJson:
    """Return how many entries a token is scored against at most."""
    tables, keys = (spec_body.type_of(node.inputs[i]) for i in (5, 2))
    if len(node.inputs) > 6:
        size = int(str(node.attr["block_size"]))
        return constant(spec_body.type_of(node.inputs[6]).shape[1]) * size
    return ["mul", to_json(tables.shape[1]), constant(keys.shape[1])]


def segment_of(body: Graph) -> int | None:
    """Return how many rows that follow each other come together, or None if there are none."""
    (node,) = body.nodes
    together = constant(body.type_of(node.inputs[2]).shape[1])
    if len(node.inputs) > 6:
        together = math.gcd(together, int(str(node.attr["block_size"])))
    return next((n for n in (16, 8, 4) if together % n == 0), None)


def index(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the template's variables."""
    body, schedule = spec.body, spec.schedule.values
    (node,) = body.nodes
    q, w, keys, positions, rows, tables = node.inputs[:6]
    listed = constant(body.type_of(node.inputs[6]).shape[1]) if len(node.inputs) > 6 else 0
    limit = entries_of(body, node)
    work, scratch = workspace_pointers(index_parts(node, spec.schedule, limit, listed))
    streams = _streams(node)
    kernels = _kernels(constant(body.type_of(q).shape[1]), len(streams), bool(listed))
    return {
        "parameters": _parameters(spec, work),
        "heads": constant(body.type_of(q).shape[1]),
        "ratio": int(str(node.attr["ratio"])),
        "block_size": int(str(node.attr.get("block_size", 1))),
        "segment": segment_of(body),
        "span": schedule["span"],
        "limit": limit if isinstance(limit, int) else f"({limit[1]} * {limit[2]})",
        "row_bytes": ROW_BYTES,
        "tables": tables,
        "stride": to_json(body.type_of(tables).shape[1]),
        "per_page": constant(body.type_of(keys).shape[1]),
        "streams": streams,
        "candidates": node.inputs[6] if listed else None,
        "listed": listed,
        "out": node.name,
        "out_width": constant(node.type.shape[1]),
        "q": q,
        "w": w,
        "keys": keys,
        "positions": positions,
        "request_rows": rows,
        "images": kernels,
        "work": work,
        "slab": schedule["slab"],
        "grids": {k["kernel"]: k["grid"] for k in kernels},
        "spans": ["ceildiv", limit, schedule["span"]],
        "host": _host(spec, work, scratch, limit, kernels),
    }


def _streams(node: Node) -> list[Mapping[str, Any]]:
    k, blocks = (int(str(node.attr.get(name, 0))) for name in ("k", "blocks"))
    found: list[Mapping[str, Any]] = [{"name": "best", "k": k, "offset": 0}]
    return [*found, {"name": "blocks", "k": blocks, "offset": k}] if blocks else found


def _kernels(heads: int, streams: int, lists: bool) -> list[Mapping[str, Any]]:
    """Kernels in order: threads, shared bytes, and blocks; `spans` and `count` are the host's."""
    choose = {"threads": 1024, "shared": CHOICE_BYTES}
    score = {"threads": 512, "shared": heads * WIDTH * 2 + STREAM_BYTES}
    found: list[Mapping[str, Any]] = [
        {"kernel": "score", **score, "grid": ("spans", "count")},
        {"kernel": "choose", **choose, "grid": ("count", str(streams))},
    ]
    first = {"kernel": "list_candidates", **choose, "grid": ("count", "1")}
    return [first, *found] if lists else found


def _parameters(spec: KernelSpec, work: Sequence[Pointer]) -> str:
    written = {spec.body.nodes[0].name} | {p.name for p in work}
    found = [parameter(p, p.name in written) for p in (*pointers(spec), *work)]
    return ", ".join([*found, *(f"int {n}" for n in int_names(spec.body)), "int first"])


def _host(
    spec: KernelSpec,
    work: Sequence[Pointer],
    scratch: DimJson,
    limit: DimJson,
    kernels: Sequence[Mapping[str, Any]],
) -> str:
    """The host function: tokens are taken a slab at a time."""
    head, end = host_text(spec, [], scratch).rsplit("  return 0;", 1)
    tokens = cpp_extent(to_json(spec.body.nodes[0].type.shape[0]))
    schedule, found = spec.schedule.values, (*pointers(spec), *work)
    lines = [
        f"  const int64_t spans = {cpp_extent(['ceildiv', limit, schedule['span']])};",
        f"  for (int64_t start = 0; start < {tokens}; start += {schedule['slab']}) {{",
        f"    const int64_t left = {tokens} - start;",
        f"    const int64_t count = left < {schedule['slab']} ? left : {schedule['slab']};",
        "    int32_t first = (int32_t)start;",
    ]
    for i, p in enumerate(found):
        lines.append(
            f"    uint64_t p{i} = (uint64_t)(uintptr_t){p.tensor}->data + {cpp_extent(p.offset)};"
        )
    ints = int_names(spec.body)
    lines += [f"    int32_t n{i} = (int32_t){name};" for i, name in enumerate(ints)]
    places = [f"&p{i}" for i in range(len(found))] + [f"&n{i}" for i in range(len(ints))]
    lines.append(f"    void* parameters[] = {{{', '.join([*places, '&first'])}}};")
    device = f"{pointers(spec)[0].tensor}->device.device_id"
    for kernel in kernels:
        name, (x, y) = kernel["kernel"], kernel["grid"]
        lines += [
            f"    const int64_t {name}_grid[] = {{{x}, {y}, 1}};",
            f"    TW_LAUNCH({name}, {name}_grid, parameters, {device});",
        ]
    return head + "\n".join([*lines, "  }"]) + "\n  return 0;" + end
