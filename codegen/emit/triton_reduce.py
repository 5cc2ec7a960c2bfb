"""Sums and maxima over the last axis of a row: fixed lanes, each summed in order, then a fixed
tree, so that neither warps nor the compiler's layout can change a bit.
"""

from __future__ import annotations

from tilewright.codegen.emit.triton_calls import Call
from tilewright.codegen.emit.triton_places import Index, joined_masks, power_of_two
from tilewright.codegen.emit.triton_values import Scope
from tilewright.graph.errors import LowerError

UNROLLED = 96  # passes that are written out
FRAME = 16384  # elements of a two-axis block


def reduction(c: Call, most_lanes: int) -> str:
    """Return the variable of a sum or maximum, at the lines of the index."""
    outer, width = c.index[:-1], c.shape(0)[-1]
    lanes = min(most_lanes, power_of_two(width))
    count = max((i.size for i in outer), default=0)
    if count * lanes > FRAME:
        raise LowerError(f"reduction '{c.node.name}': {count} lines of a row are too many")
    shape = f"({count}, {lanes})" if count > 1 else f"({lanes},)"
    start = "0.0" if _is_sum(c) else "float('-inf')"
    total = c.values.name(
        c.scope, f"lanes_{c.node.name}", f"tl.full({shape}, {start}, tl.float32)"
    )
    if -(-width // lanes) <= UNROLLED:
        places = c.values.passes(c.scope, width, lanes, across=count > 1)
        for last in places:
            _step(c, c.scope, total, (*outer, last))
    else:
        _loop(c, total, outer, width, lanes)
    return _tree(c, total, max(count, 1), lanes)


def _is_sum(c: Call) -> bool:
    return c.node.op == "reduce_sum"


def _step(c: Call, scope: Scope, total: str, index: tuple[Index, ...]) -> None:
    rank = c.type_of(0).rank
    value = c.values.operand(scope, c.node.inputs[0], index, rank, c.row)
    step = f"{total} + {value}" if _is_sum(c) else f"tw_max({total}, {value})"
    mask = joined_masks(index[-1:])
    scope.lines.append(f"{total} = tl.where({mask}, {step}, {total})" if mask
                       else f"{total} = {step}")  # fmt: skip


def _loop(c: Call, total: str, outer: tuple[Index, ...], width: int, lanes: int) -> None:
    scope = c.scope.child()
    across = "[None, :]" if any(i.size > 1 for i in outer) else ""
    text = c.values.name(scope, "j", f"base + tl.arange(0, {lanes}){across}")
    ragged = width % lanes != 0
    _step(c, scope, total, (*outer, Index(text, f"{text} < {width}" if ragged else "")))
    c.scope.lines += [
        f"for base in range(0, {width}, {lanes}):", *("    " + line for line in scope.lines)
    ]  # fmt: skip


def _tree(c: Call, total: str, count: int, lanes: int) -> str:
    """Add halves until one lane is left; an addition of two has no order to choose."""
    if lanes == 1 and count == 1:
        return c.values.name(c.scope, c.node.name, f"tl.max(tl.reshape({total}, (1,)), axis=0)")
    while lanes > 1:
        lanes //= 2
        if count > 1:
            shape, axis = f"({count}, 2, {lanes})", 1
        else:
            shape, axis = f"(2, {lanes})", 0
        if lanes == 1:
            shape, axis = (f"({count}, 2)", 1) if count > 1 else ("(2,)", 0)
        halves = f"tl.reshape({total}, {shape})"
        folded = (
            f"tl.sum({halves}, axis={axis})"
            if _is_sum(c)
            else f"tl.reduce({halves}, {axis}, tw_max)"
        )
        total = c.values.name(c.scope, f"lanes_{c.node.name}", folded)
    if count > 1:
        return c.values.name(c.scope, c.node.name, f"tl.reshape({total}, ({count}, 1))")
    return total
