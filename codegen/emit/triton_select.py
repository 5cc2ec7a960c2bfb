"""Positions and values of the largest entries of a row: exact, so no order is to be fixed."""

from __future__ import annotations

from tilewright.codegen.emit.shapes import inner_shape
from tilewright.codegen.emit.triton_places import ZERO, Index, power_of_two
from tilewright.codegen.emit.triton_values import Scope, Values
from tilewright.graph import Node
from tilewright.graph.errors import LowerError

_BLOCK = 8192
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
    """Every lane keeps the first of its largest entries; one comparison of all lanes ends it."""
    block = min(_BLOCK, power_of_two(width))
    scope = top.child()
    scope.lines.append(f"j = base + tl.arange(0, {block})")
    value = _shown(values, scope, node, outer, Index("j", f"j < {width}"))
    scope.lines += [
        f"shown = tl.where(j < {width}, {value}, float('-inf'))",
        "bad = bad | (shown != shown).to(tl.int32)",
        "place = tl.where(shown > best, j, place)",
        "best = tl.where(shown > best, shown, best)",
    ]
    top.lines += [
        f"bad = tl.zeros(({block},), tl.int32)",
        f"place = tl.zeros(({block},), tl.int32)",
        f"best = tl.full(({block},), float('-inf'), tl.float32)",
        f"for base in tl.range(0, {width}, {block}, loop_unroll_factor=4):",
        *("    " + line for line in scope.lines),
        "top = tl.max(best, axis=0)",
        f"at = tl.min(tl.where(best == top, place, {width}), axis=0)",
        f"tl.store({pointer} + {values.row.text}, tl.where(tl.max(bad, axis=0) > 0, 0, at))",
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
    key = values.name(scope, "key", f"tw_order_key({value})")
    alive = f"tl.where({j} < {width}, tw_keyed_place({key}, {j}), tw_no_key())"
    left = values.name(scope, "left", alive)
    result = "tw_place_of(top)" if node.op == "top_k_indices" else "tw_key_value(tw_key_of(top))"
    scope.lines += [
        f"for taken in range(0, {k}):",
        f"    top = tl.max({left}, axis=0)",
        f"    tl.store({pointer} + {values.row.text} * {k} + taken, {result})",
        f"    {left} = tl.where({left} == top, tw_no_key(), {left})",
    ]
