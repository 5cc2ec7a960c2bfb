"""Pack block-quantised weights [N, K] into the layout that GPU kernels read, and back.

Integer codes have three sections, each aligned to 256 bytes: codes, scales, minima. Every section
is [panel, group, 16 rows, ..], so that one group of 16 rows is contiguous. Codes of 4 bits: byte i
of a group holds k = 2 i (low nibble) and k = 2 i + 1 (high). Rows past N are zero. Float codes are
packed by pack_tiles.py. The matrices of a stack follow one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.pack_cpu import Unpacked
from tilewright.codegen.pack_tiles import TILE_BITS, pack_tiles
from tilewright.codegen.pack_tiles import matrix_bytes as tile_matrix_bytes
from tilewright.graph.errors import LowerError
from tilewright.graph.types import BlockFormat, TensorType

ROWS = 16
SECTION = 256
Array = NDArray[Any]


@dataclass(frozen=True)
class BlockLayout:
    """One format: values of k per group, bytes of their codes a row, type of scales."""

    group: int
    code_bytes: int
    scale: str
    has_min: bool = False


BLOCK_LAYOUTS = {
    "q4_1": BlockLayout(32, 16, "<f2", has_min=True),
    "q8_0": BlockLayout(32, 32, "<f2"),
    "q8_g16": BlockLayout(16, 16, "<f4"),
}


@dataclass(frozen=True)
class Sections:
    """Where the sections of one packed weight start, in bytes; `minima` is `end` without any."""

    scales: int
    minima: int
    end: int


def block_layout(name: str) -> BlockLayout:
    """Look up a format. Raises LowerError for one without layout."""
    if name not in BLOCK_LAYOUTS:
        raise LowerError(f"weight format '{name}': no GPU layout: have {', '.join(BLOCK_LAYOUTS)}")
    return BLOCK_LAYOUTS[name]


def sections(name: str, n: int, k: int) -> Sections:
    """Return the places of the sections of a packed [n, k] weight.

    Raises LowerError if k does not hold whole groups.
    """
    layout = block_layout(name)
    if k % layout.group:
        raise LowerError(f"weight format '{name}': got k = {k}, want a multiple of {layout.group}")
    cells = -(-n // ROWS) * (k // layout.group) * ROWS
    scale_bytes = _up(cells * np.dtype(layout.scale).itemsize)
    scales = _up(cells * layout.code_bytes)
    minima = scales + scale_bytes
    return Sections(scales, minima, minima + (scale_bytes if layout.has_min else 0))


def refuses_format(type_: TensorType) -> str | None:
    """Say why a quantised weight cannot be multiplied by the kernels, or return None."""
    dtype = type_.dtype
    if not isinstance(dtype, BlockFormat):
        return None
    tiles = dtype.name in TILE_BITS and dtype.scale.name == "ue8m0" and not dtype.tail
    rows, group = dtype.block
    if tiles and (rows > 1 or dtype.code.bits == 4):  # fp8 with scales by row is for tables
        group = 32
    elif tiles or dtype.name not in BLOCK_LAYOUTS or rows != 1:
        return f"weight format {dtype} has no packed layout"
    k = int(type_.shape[-1])
    return f"k = {k} is no multiple of the group of {group}" if k % group else None


def matrix_bytes(name: str, n: int, k: int) -> int:
    """Return the size of one packed [n, k] matrix."""
    if name in TILE_BITS:
        return tile_matrix_bytes(name, n, k)
    return sections(name, n, k).end


def lies_as_rows(dtype: BlockFormat) -> bool:
    """Say whether weights of a format lie as rows of codes, then scales: tables, for gathering."""
    return dtype.name in TILE_BITS and dtype.code.bits == 8 and dtype.block[0] == 1


def packed_bytes(type_: TensorType) -> int:
    """Return the size of a packed weight [.., n, k]."""
    *stack, n, k = (int(d) for d in type_.shape)
    if isinstance(type_.dtype, BlockFormat) and lies_as_rows(type_.dtype):
        return math.prod(stack) * n * type_.dtype.row_bytes(k)
    return math.prod(stack) * matrix_bytes(type_.dtype.name, n, k)


def pack_matrix(dtype: BlockFormat, found: Unpacked) -> NDArray[np.uint8]:
    """Pack one matrix of any format into bytes."""
    if dtype.name in TILE_BITS:
        return pack_tiles(dtype.name, found, dtype.block)
    return pack_blocks(dtype.name, found)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // SECTION) * SECTION


def pack_blocks(name: str, found: Unpacked) -> NDArray[np.uint8]:
    """Pack codes [N, K] with scales (and minima) [N, K / group] into bytes."""
    layout = block_layout(name)
    if found.codes is None or found.d is None or (layout.has_min and found.m is None):
        raise LowerError(f"weight format '{name}': codes or scales are missing")
    n, k = found.codes.shape
    places = sections(name, n, k)
    out = np.zeros(places.end, np.uint8)
    codes = _by_panel(found.codes.view(np.uint8), layout.group)
    if layout.code_bytes * 2 == layout.group:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    _put(out, 0, codes)
    _put(out, places.scales, _by_panel(found.d.astype(layout.scale, copy=False), 1))
    if layout.has_min and found.m is not None:
        _put(out, places.minima, _by_panel(found.m.astype(layout.scale, copy=False), 1))
    return out


def unpack_blocks(name: str, packed: NDArray[np.uint8], n: int, k: int) -> Unpacked:
    """Invert `pack_blocks`. Raises LowerError if the number of bytes is not that of [n, k]."""
    layout, places = block_layout(name), sections(name, n, k)
    if packed.size != places.end:
        raise LowerError(
            f"weight format '{name}': size differs from [{n}, {k}]: got {packed.size} bytes, "
            f"want {places.end}"
        )
    groups, panels = k // layout.group, -(-n // ROWS)
    shape = (panels, groups, ROWS)
    codes = packed[: panels * groups * ROWS * layout.code_bytes].reshape(*shape, layout.code_bytes)
    if layout.code_bytes * 2 == layout.group:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*shape, layout.group)
    else:
        codes = codes.view(np.int8)
    size = panels * groups * ROWS * np.dtype(layout.scale).itemsize
    scales = [
        _by_row(packed[at : at + size].view(layout.scale).reshape(*shape, 1), n)
        for at in ((places.scales, places.minima) if layout.has_min else (places.scales,))
    ]
    return Unpacked(codes=_by_row(codes, n), d=scales[0], m=scales[1] if layout.has_min else None)


def _by_panel(matrix: Array, group: int) -> Array:
    """[N, G * group] -> [panel, G, 16, group], absent rows zero."""
    padded = np.pad(matrix, ((0, -matrix.shape[0] % ROWS), (0, 0)))
    blocks = padded.reshape(-1, ROWS, matrix.shape[1] // group, group)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3))


def _by_row(blocks: Array, n: int) -> Array:
    """[panel, G, 16, group] -> [N, G * group]."""
    panels, groups, rows, group = blocks.shape
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(panels * rows, -1)[:n]


def _put(out: NDArray[np.uint8], at: int, values: Array) -> None:
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    out[at : at + raw.size] = raw
