"""Texts of the Triton template for few sums of long rows with fp32 weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import (
    Launch,
    host_text,
    launch_table,
    parameters,
    workspace_pointers,
)
from tilewright.codegen.emit.triton_places import power_of_two
from tilewright.codegen.numerics import segment_length
from tilewright.codegen.spec import KernelSpec, Numerics
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson, to_json

LEAST_COLUMNS = 16  # of a matrix instruction's tile


def used_segments(body: Graph, numerics: Numerics) -> int:
    """Return the segments that hold values of k."""
    k = constant(body.type_of(_linear(body).inputs[0]).shape[-1])
    return -(-k // segment_length(k, numerics.segments))


def _linear(body: Graph) -> Node:
    (node,) = body.nodes
    return node


def parts_bytes(body: Graph, numerics: Numerics) -> DimJson:
    """Return the bytes of the sums of all segments."""
    node = _linear(body)
    columns = _padded(constant(node.type.shape[-1]))
    return ["mul", to_json(node.type.shape[0]), used_segments(body, numerics) * columns * 4]


def _padded(columns: int) -> int:
    return max(LEAST_COLUMNS, power_of_two(columns))


def thin(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the template's variables."""
    body, schedule = spec.body, spec.schedule.values
    node = _linear(body)
    x, w = node.inputs
    rows, k, n = (to_json(node.type.shape[0]), constant(body.type_of(x).shape[-1]),
                  constant(node.type.shape[-1]))  # fmt: skip
    segments = used_segments(body, spec.numerics)
    work, scratch = workspace_pointers({"parts": ("fp32", parts_bytes(body, spec.numerics))})
    launches = [
        Launch("products", (["ceildiv", rows, schedule["bm"]], segments, 1), schedule["warps"],
               schedule["stages"], work),
        Launch("combine", (rows, 1, 1), 1, 1, work),
    ]  # fmt: skip
    return {
        "parameters": parameters(spec, launches[0]),
        "x": x,
        "w": w,
        "y": node.name,
        "num_rows": rows,
        "k": k,
        "n": n,
        "padded": _padded(n),
        "bm": schedule["bm"],
        "bk": schedule["bk"],
        "segments": segments,
        "segment": segment_length(k, spec.numerics.segments),
        "launches": launch_table(spec, launches),
        "host": host_text(spec, launches, scratch),
    }
