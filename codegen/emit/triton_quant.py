"""Quantised rows in Triton: values of groups, and packed rows of bytes in a state.

A packed row is codes | tail of bf16 | scales (padded with zeros to 8 bytes behind a tail).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.codegen.emit.triton_calls import Call
from tilewright.codegen.emit.triton_places import Index, block_shape, joined_masks, whole
from tilewright.graph.errors import LowerError
from tilewright.graph.types import BlockFormat


@dataclass(frozen=True)
class Codes:
    """How a format's groups are coded: names of functions in tw_quant."""

    name: str
    code: str
    scale_code: str


CODES: Mapping[tuple[str, str], Codes] = {
    ("fp8_e4m3", "ue8m0"): Codes("mxfp8", "tw_code_e4m3", "tw_power_code"),
    ("fp4_e2m1", "ue8m0"): Codes("mxfp4", "tw_code_e2m1", "tw_power_code"),
    ("fp4_e2m1", "fp8_e4m3"): Codes("nvfp4", "tw_code_e2m1", "tw_code_e4m3"),
}


def codes_of(target: BlockFormat) -> Codes:
    """Return the functions of an activation format; LowerError for another one."""
    key = target.code.name, target.scale.name
    if key not in CODES or target.block[0] != 1:
        known = ", ".join(" with ".join(k) for k in CODES)
        raise LowerError(f"format '{target}': has no packed rows: have {known}")
    return CODES[key]


@dataclass(frozen=True)
class Groups:
    """One block of a row in groups: raw values, codes as values [.., groups, g], scales
    [.., groups, 1]; `raw` alone where the block holds the tail only."""

    raw: str
    values: str
    scales: str
    group: int


def _target(c: Call) -> tuple[BlockFormat, int]:
    target, width = c.node.type.dtype, c.values.shape_of(c.node)[-1]
    assert isinstance(target, BlockFormat)
    return target, width - target.tail


def groups_of(c: Call) -> Groups:
    """Code the groups of one block."""
    (target, coded), last = _target(c), c.index[-1]
    if not last.size:
        raise LowerError(
            f"quantise '{c.node.name}': is read at {last.text}: want a block of neighbours"
        )
    tag = " ".join(i.text for i in c.index)
    raw = c.operand(0, c.index)
    if last.base >= coded:
        return Groups(raw, "", "", 0)
    group = min(target.block[1], last.size)
    if last.base % group:
        raise LowerError(f"quantise '{c.node.name}': a block starts within a group of {group}")
    name, shape = codes_of(target).name, block_shape(c.index)
    block = whole(raw, c.index)
    if last.base + last.size > coded:
        block = f"tl.where({last.text} < {coded}, {block}, 0.0)"
    apart = (*shape[:-1], shape[-1] // group, group)
    x = c.once(f"x@{tag}", f"tl.reshape({block}, {apart})")
    most = f"tl.max(tw_size({x}), axis={len(apart) - 1}, keep_dims=True)"
    scales = c.once(f"scale@{tag}", f"tw_scale_{name}({most})")
    values = c.once(f"code@{tag}", f"tw_values_{name}({x}, {scales})")
    return Groups(raw, values, scales, group)


def quantise(c: Call) -> str:
    """What the format can store of a block."""
    (_, coded), last = _target(c), c.index[-1]
    found = groups_of(c)
    tail = f"tw_round_bf16({found.raw})"
    if not found.values:
        return tail
    rounded = f"tl.reshape({found.values} * {found.scales}, {block_shape(c.index)})"
    if last.base + last.size > coded and coded < c.values.shape_of(c.node)[-1]:
        return f"tl.where({last.text} < {coded}, {rounded}, {tail})"
    return rounded


def packed_store(c: Call, place: str) -> list[str]:
    """Return the statements that store one block of a packed row at the pointer `place`."""
    (target, coded), last = _target(c), c.index[-1]
    found, lines = groups_of(c), list[str]()
    code_bytes = -(-coded * target.code.bits // 8)
    if found.values:
        lines += _store_codes(c, place, found, coded, target)
    if last.base + last.size > coded and target.tail:
        lines += _store_tail(c, f"{place} + {code_bytes}", found.raw, coded)
    if found.values:
        lines += _store_scales(c, f"{place} + {code_bytes + 2 * target.tail}", found, coded)
    return lines


def _store_codes(
    c: Call, place: str, found: Groups, coded: int, target: BlockFormat
) -> list[str]:
    last, codes = c.index[-1], f"{codes_of(target).code}({found.values})"
    if target.code.bits == 8:
        limit = f"{last.text} < {coded}" if last.base + last.size > coded else ""
        flat = f"tl.reshape({codes}, {block_shape(c.index)})"
        return [_store(f"{place} + {last.text}", flat, limit)]
    half = last.size // 2
    pairs = f"tw_pairs(tl.reshape({codes}, ({half}, 2)))"
    column = _column(c, half, last.base // 2)
    limit = f"{column} < {(coded + 1) // 2}" if last.base + last.size > coded else ""
    return [_store(f"{place} + {column}", pairs, limit)]


def _store_tail(c: Call, place: str, raw: str, coded: int) -> list[str]:
    """Two bytes a value, the lower first: a row of bytes may start anywhere."""
    last = c.index[-1]
    parts = [replace(last, mask=last.mask)]
    if last.base < coded:
        parts.append(Index("", f"{last.text} >= {coded}"))
    rounded = f"{whole(raw, c.index)}.to(tl.bfloat16).to(tl.int16, bitcast=True)"
    bits = c.once(f"tail@{last.text}", f"{rounded}.to(tl.int32)")
    at, mask = f"{place} + ({last.text} - {coded}) * 2", joined_masks(parts)
    halves = f"({bits} & 255)", f"(({bits} >> 8) & 255)"
    return [_store(at, halves[0], mask), _store(f"{at} + 1", halves[1], mask)]


def _store_scales(c: Call, place: str, found: Groups, coded: int) -> list[str]:
    last, target = c.index[-1], _target(c)[0]
    count, here = -(-coded // target.block[1]), last.size // found.group
    base = last.base // target.block[1]
    column = _column(c, here, base)
    codes = f"tl.reshape({codes_of(target).scale_code}({found.scales}), ({here},))"
    limit = f"{column} < {count}" if base + here > count else ""
    lines = [_store(f"{place} + {column}", codes, limit)]
    pad = -count % 8 if target.tail else 0
    if pad and not base:
        zeros = "tl.zeros((8,), tl.int32)"
        eight = _column(c, 8, 0)
        lines.append(_store(f"{place} + {count} + {eight}", zeros, f"{eight} < {pad}"))
    return lines


def _column(c: Call, size: int, base: int) -> str:
    text = f"tl.arange(0, {size})" + (f" + {base}" if base else "")
    return c.values.once(c.scope, ("column", str(size), str(base)), "column", text)


def _store(at: str, value: str, mask: str) -> str:
    return f"tl.store({at}, {value}.to(tl.uint8){f', mask={mask}' if mask else ''})"
