"""Contractions with a stack of matrices: what the template is told about which row meets which.

Rows of results are numbered token * slots + slot, in C++ as in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.codegen.emit.shapes import constant
from tilewright.graph import Graph, Node


def routing(body: Graph, anchor: Node) -> Mapping[str, Any] | None:
    """Return the template's `routing` of a contraction, None where one matrix meets all rows."""
    if anchor.op == "linear":
        return None
    slots = constant(anchor.type.shape[1])
    if anchor.op == "grouped_linear":
        return {"kind": "groups", "count": slots, "slots": slots, "shared": False}
    x, w, ids = anchor.inputs
    return {
        "kind": "experts",
        "count": constant(body.type_of(w).shape[0]),
        "slots": slots,
        "shared": body.type_of(x).rank == 2,
        "ids": f"args.{ids}",
    }


def place(anchor: Node) -> tuple[tuple[str, ...], str]:
    """Return the index within a token, and the token, of an element of a contraction's result."""
    if anchor.op == "linear":
        return ("(col + l)",), "row"
    slots = constant(anchor.type.shape[1])
    return (f"(row % {slots})", "(col + l)"), f"(row / {slots})"
