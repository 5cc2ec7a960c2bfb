"""Positions and values of the largest entries of a row: exact, so no order is to be fixed."""

from __future__ import annotations

from tilewright.codegen.emit.shapes import inner_shape
from tilewright.codegen.emit.triton_places import ZERO, Index, power_of_two
from tilewright.codegen.emit.triton_values import Scope, Values
from tilewright.graph import Node
from tilewright.graph.errors import LowerError

_BLOCK = 4096
_MAX_TOP_K_WIDTH = 16384


def select(values: Values, scope: Scope, node: Node, pointer: str) -> None:
    """Print the statements that store what a node selects."""
    type_ = values.body.type_of(node.inputs[0])
    *outer, width = inner_shape(type_, type_.rank, values.rows)
    if any(e != 1 for e in outer):
        raise LowerError(f"{node.op} '{node.name}': got {outer} rows in a row, want one")
    if node.op == "argmax":
        _argmax(values, scope, node, pointer, len(outer), width)
    else:
        _top_k(values, scope, node, pointer, len(outer), width)


def _shown(values: Values, scope: Scope, node: Node, outer: int, last: Index) -> str:
    rank = values.body.type_of(node.inputs[0]).rank
    return values.operand(scope, node.inputs[0], (*(ZERO,) * outer, last), rank, values.row)


def _argmax(
    values: Values, top: Scope, node: Node, pointer: str, outer: int, width: int
) -> None:
    block = min(_BLOCK, power_of_two(width))
    scope = top.child()
    scope.lines.append(f"j = base + tl.arange(0, {block})")
    value = _shown(values, scope, node, outer, Index("j", f"j < {width}"))
    scope.lines += [
        f"shown = tl.where(j < {width}, {value}, float('-inf'))",
        "bad = tl.maximum(bad, tl.max((shown != shown).to(tl.int32), axis=0))",
        "top = tl.max(shown, axis=0)",
        f"at = tl.min(tl.where((shown == top) & (j < {width}), j, {width}), axis=0)",
        "place = tl.where(top > best, at, place)",
        "best = tl.where(top > best, top, best)",
    ]
    top.lines += [
        "bad = tl.full([], 0, tl.int32)",
        "place = tl.full([], 0, tl.int32)",
        "best = tl.full([], float('-inf'), tl.float32)",
        f"for base in range(0, {width}, {block}):",
        *("    " + line for line in scope.lines),
        f"tl.store({pointer} + {values.row.text}, tl.where(bad > 0, 0, place))",
    ]


def _top_k(
    values: Values, scope: Scope, node: Node, pointer: str, outer: int, width: int
) -> None:
    """Take the largest k times; keys order like entries, NaN above all, zeros equal."""
    padded, k = power_of_two(width), int(str(node.attr["k"]))
    if padded > _MAX_TOP_K_WIDTH:
        raise LowerError(
            f"{node.op} '{node.name}': row too long: got {width}, want {_MAX_TOP_K_WIDTH}"
        )
    j = values.name(scope, "k", f"tl.arange(0, {padded})")
    last = Index(j, f"{j} < {width}" if padded != width else "")
    value = _shown(values, scope, node, outer, last)
    key, alive = values.name(scope, "key", f"tw_order_key({value})"), f"alive_{j}"
    result = "at" if node.op == "top_k_indices" else "tw_key_value(top)"
    scope.lines += [
        f"{alive} = {j} < {width}",
        f"for taken in range(0, {k}):",
        f"    top = tl.max(tl.where({alive}, {key}, -2147483648), axis=0)",
        f"    at = tl.min(tl.where({alive} & ({key} == top), {j}, {padded}), axis=0)",
        f"    tl.store({pointer} + {values.row.text} * {k} + taken, {result})",
        f"    {alive} = {alive} & ({j} != at)",
    ]
