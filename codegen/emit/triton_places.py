"""Positions in Triton: an index is one block of integers per axis, with the mask of its tail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Index:
    """Positions along one axis: text, the condition under which they exist, whether a block.

    A block of `size` neighbouring positions, counted from `base`, knows both; others have size 0.
    """

    text: str
    mask: str = ""
    block: bool = True
    base: int = 0
    size: int = 0

    @property
    def number(self) -> int | None:
        """The one position, where it is known."""
        return int(self.text) if self.text.isdigit() else None


def at(number: int) -> Index:
    """One known position."""
    return Index(str(number), block=False)


ZERO = at(0)


def joined_masks(parts: Iterable[Index]) -> str:
    """Return the condition under which all of these positions exist; empty for always."""
    return " & ".join(dict.fromkeys(f"({p.mask})" for p in parts if p.mask))


def linear(index: tuple[Index, ...], shape: tuple[int, ...]) -> Index:
    """Row-major offset of an index; axes of extent 1 count as position 0."""
    terms, used, stride, start = list[str](), list[Index](), 1, 0
    run: Index | None = None
    for part, extent in zip(reversed(index), reversed(shape), strict=True):
        if extent != 1 and part.number is not None:
            start += part.number * stride
        elif extent != 1:
            terms.append(part.text if stride == 1 else f"{part.text} * {stride}")
            used.append(part)
            run = part if stride == 1 else run
        stride *= extent
    terms = [*([str(start)] if start else []), *reversed(terms)]
    mask = joined_masks(reversed(used))
    text = f"({' + '.join(terms)})" if len(terms) > 1 else (terms or ["0"])[0]
    if run is None or len(used) > 1 or not run.size:
        return Index(text, mask, any(p.block for p in used))
    return Index(text, mask, run.block, start + run.base, run.size)


def unravel(offset: Index, shape: tuple[int, ...]) -> tuple[Index, ...]:
    """Invert `linear`."""
    found, stride = list[Index](), 1
    outermost = next((axis for axis, extent in enumerate(shape) if extent != 1), 0)
    for axis, extent in reversed(list(enumerate(shape))):
        found.append(_coordinate(offset, stride, extent, outermost=axis == outermost))
        stride *= extent
    return tuple(reversed(found))


def _coordinate(offset: Index, stride: int, extent: int, *, outermost: bool) -> Index:
    """One axis of an offset; a block that stays within one line knows the line."""
    if extent == 1:
        return ZERO
    first = offset.number
    if offset.size and offset.base // stride == (offset.base + offset.size - 1) // stride:
        first = offset.base
    if first is not None:
        return at(first // stride if outermost else first // stride % extent)
    if outermost and stride == 1:
        return offset
    line = stride * extent
    inside = offset.size and offset.base // line == (offset.base + offset.size - 1) // line
    if inside and stride == 1 and not outermost:
        start = offset.base // line * line
        text = f"({offset.text} - {start})" if start else offset.text
        return Index(text, offset.mask, offset.block, offset.base - start, offset.size)
    text = offset.text if stride == 1 else f"({offset.text} // {stride})"
    if not outermost:
        text = f"({text} % {extent})"
    return Index(text, offset.mask, offset.block)


def block_shape(index: tuple[Index, ...]) -> tuple[int, ...]:
    """Shape of the block that an index spans: its last axis, and lines of it if they are one."""
    *outer, last = index
    lines = max((i.size for i in outer), default=0)
    return (lines, last.size) if lines > 1 else (last.size,)


def block_form(index: tuple[Index, ...]) -> str:
    """Lines, size of a line and rank of the block that an index spans."""
    shape = block_shape(index)
    return f"{1 if len(shape) == 1 else shape[0]}, {shape[-1]}, {len(shape)}"


def whole(value: str, index: tuple[Index, ...]) -> str:
    """Return a value as the block that an index spans, also where it is the same for all."""
    return f"tl.broadcast_to({value}, {block_shape(index)})"


def load(pointer: str, offset: str, parts: Iterable[Index]) -> str:
    """Return a load of the elements that exist; the others read as 0."""
    parts = list(parts)
    mask = joined_masks(p for p in parts if p.block)
    tail = f", mask={mask}, other=0" if mask else ""
    return f"tl.load({pointer} + {offset}{tail})"
