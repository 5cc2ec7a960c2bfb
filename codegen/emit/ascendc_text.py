"""Pieces of AscendC text that row programs share: how threads or warps divide elements."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.emit.shapes import constant
from tilewright.graph.dims import product

THREADS, WARP = 256, 32
BARRIER = "asc_syncthreads();"


def spread(shape: tuple[int, ...], inner: list[str], *, warps: bool = False) -> list[str]:
    """Share the elements of all rows of the tile among threads, or among warps.

    Statements find `row`, the index as i0, i1, .. (of threads the last is j), and `lane` of warps.
    """
    count = constant(product(shape)) if shape else 1
    first = f"threadIdx.x / {WARP}" if warps else "threadIdx.x"
    step = THREADS // WARP if warps else THREADS
    lines = [f"for (int32_t e = {first}; e < rows * {count}; e += {step}) {{"]
    lines.append(f"  const int32_t row = e{f' / {count}' if count != 1 else ''};")
    if warps:
        lines.append(f"  const int32_t lane = threadIdx.x % {WARP};")
    stride = 1
    names = [f"i{axis}" for axis in range(len(shape) if warps else len(shape) - 1)]
    names += [] if warps else ["j"]
    for name, extent in reversed(list(zip(names, shape, strict=False))):
        part = "e" if stride == 1 else f"e / {stride}"
        lines.append(f"  const int32_t {name} = {part} % {extent};")
        stride *= extent
    return [*lines, *("  " + line for line in inner), "}"]


def block(lines: Sequence[str]) -> list[str]:
    return ["{", *("  " + line for line in lines), "}"]
