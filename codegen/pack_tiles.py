"""Pack fp8 (e4m3) and fp4 (e2m1) weights with power-of-two scales for GPU kernels, and back.

A tile is 64 rows of 128 values of k in parts of 16 bytes, [panel, span, part, 64 rows, 16]. Byte i
of a part of fp8 holds k = ORDER[i]; of fp4, k = ORDER[i] (low nibble) and ORDER[i] + 16: a word has
what one thread of a matrix instruction takes of a row, and nibbles 16 bits apart are neighbours.
fp8 codes with a scale for 128 values of k meet the matrix unit as they are: [panel, span, 64 rows,
128]. After the tiles, 256-byte aligned, the scales: a ue8m0 byte per row and group of 32, [panel,
span, 64 rows, 4]. Absent rows and values of k are zeros. A stack of matrices is one after the
other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.pack_cpu import Unpacked
from tilewright.graph.errors import LowerError

TILE_ROWS, SPAN, GROUP = 64, 128, 32
GROUPS = SPAN // GROUP
PART = 16  # bytes
ORDER = [2 * (i // 4) + i % 4 // 2 + i % 2 * 8 for i in range(PART)]
TILE_BITS = {"fp8_e4m3": 8, "fp4_e2m1": 4}
# Products of two scales stay normal fp32 numbers: an activation's is at least 2^-22, at most 2^119.
_LOWEST, _HIGHEST, _ONE = 28, 134, 127
Array = NDArray[Any]
Bytes = NDArray[np.uint8]


def spans(k: int) -> int:
    """Return how many spans hold k values."""
    return -(-k // SPAN)


def row_bytes(name: str) -> int:
    """Return the bytes of one row of a tile."""
    return SPAN * TILE_BITS[name] // 8


def _cells(n: int, k: int) -> int:
    """Rows with those that fill the last panel, times spans."""
    return -(-n // TILE_ROWS) * TILE_ROWS * spans(k)


def scales_at(name: str, n: int, k: int) -> int:
    """Return where the scales of one packed [n, k] matrix start, in bytes."""
    return _cells(n, k) * row_bytes(name)


def matrix_bytes(name: str, n: int, k: int) -> int:
    """Return the size of one packed [n, k] matrix: a multiple of 256."""
    return scales_at(name, n, k) + _cells(n, k) * GROUPS


def lies_in_parts(name: str, block: tuple[int, int]) -> bool:
    """Say whether tiles of a format lie in parts, or row by row."""
    return TILE_BITS[name] == 4 or block[1] % SPAN != 0


def pack_tiles(name: str, found: Unpacked, block: tuple[int, int]) -> Bytes:
    """Pack bytes of codes [n, k] (fp4: [n, k / 2], even k in the low nibble) with one ue8m0 byte
    per `block` of rows and columns; blocks at the edges may be cut short.

    Raises LowerError if arrays do not fit, or for a scale out of the range in which no product is
    lost (2^-99 to 2^7, whatever it scales); a scale of nothing but zeros does not count.
    """
    codes, groups = _codes(name, found), _spread(name, found, block)
    n, k = codes.shape
    panels, count = -(-n // TILE_ROWS), spans(k)
    largest = (1 << (TILE_BITS[name] - 1)) - 1
    filled = np.asarray((codes & largest).reshape(n, -1, GROUP).any(-1))
    groups = np.where(_of_blocks(filled, block), groups, np.uint8(_ONE))
    _check_range(name, groups)
    padded = np.pad(codes, ((0, -n % TILE_ROWS), (0, -k % SPAN)))
    tiles: Array = padded.reshape(panels, TILE_ROWS, count, -1, PART)
    if TILE_BITS[name] == 4:
        tiles = tiles[..., 0::2, :] | tiles[..., 1::2, :] << 4
    if lies_in_parts(name, block):
        tiles = tiles[..., ORDER].transpose(0, 2, 3, 1, 4)
    else:
        tiles = tiles.transpose(0, 2, 1, 3, 4)
    scales = np.pad(groups, ((0, -n % TILE_ROWS), (0, -groups.shape[1] % GROUPS)))
    scales = scales.reshape(panels, TILE_ROWS, count, GROUPS).transpose(0, 2, 1, 3)
    return np.concatenate([np.ascontiguousarray(part).reshape(-1) for part in (tiles, scales)])


def unpack_tiles(
    name: str, packed: Bytes, n: int, k: int, block: tuple[int, int]
) -> Unpacked:
    """Invert `pack_tiles` of one matrix: codes, and scales [n, k / 32]."""
    if packed.size != matrix_bytes(name, n, k):
        raise LowerError(
            f"weight format '{name}': size differs from [{n}, {k}]: got {packed.size} bytes, "
            f"want {matrix_bytes(name, n, k)}"
        )
    panels, start, count = -(-n // TILE_ROWS), scales_at(name, n, k), spans(k)
    if lies_in_parts(name, block):
        tiles = packed[:start].reshape(panels, count, -1, TILE_ROWS, PART).transpose(0, 3, 1, 2, 4)
        tiles = tiles[..., np.argsort(ORDER)]
    else:
        tiles = packed[:start].reshape(panels, count, TILE_ROWS, -1, PART).transpose(0, 2, 1, 3, 4)
    codes: Array = tiles.reshape(panels * TILE_ROWS, -1)[:n]
    scales = packed[start:].reshape(panels, count, TILE_ROWS, GROUPS).transpose(0, 2, 1, 3)
    if TILE_BITS[name] == 4:
        halves = codes.reshape(n, -1, PART)
        wide = np.concatenate([halves & 15, halves >> 4], -1).reshape(n, -1)[:, :k]
        codes = wide[:, 0::2] | wide[:, 1::2] << 4
    else:
        codes = codes[:, :k]
    scales = scales.reshape(panels * TILE_ROWS, -1)[:n, : k // GROUP]
    return Unpacked(codes=np.ascontiguousarray(codes), d=np.ascontiguousarray(scales))


def _codes(name: str, found: Unpacked) -> Bytes:
    """Return one byte per code, [n, k]."""
    codes: Array | None = found.codes
    if codes is None or found.d is None:
        raise LowerError(f"weight format '{name}': codes or scales are missing")
    if TILE_BITS[name] == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
    if codes.dtype != np.uint8 or codes.ndim != 2 or codes.shape[1] % GROUP:
        raise LowerError(
            f"weight format '{name}': codes do not fit: got {codes.dtype} {list(codes.shape)}, "
            f"want bytes of whole groups of {GROUP} k"
        )
    return codes


def _spread(name: str, found: Unpacked, block: tuple[int, int]) -> Bytes:
    """Scales of blocks -> one per row and group of 32: [n, k / 32]."""
    codes, d, (rows, cols) = _codes(name, found), found.d, block
    n, k = codes.shape
    want = (-(-n // rows), -(-k // cols))
    if d is None or cols % GROUP or d.dtype != np.uint8 or d.shape != want:
        got = "none" if d is None else f"{d.dtype} {list(d.shape)}"
        raise LowerError(
            f"weight format '{name}': scales do not fit the codes: got {got}, "
            f"want uint8 {list(want)} for blocks of {rows}x{cols}"
        )
    return d.repeat(rows, 0)[:n].repeat(cols // GROUP, 1)[:, : k // GROUP]


def _of_blocks(filled: NDArray[np.bool_], block: tuple[int, int]) -> NDArray[np.bool_]:
    """Say of each row and group whether its block holds anything: kernels read the scale of one row
    for all of them."""
    rows, groups = block[0], block[1] // GROUP
    n, k = filled.shape
    if not n or not k:
        return filled
    found = np.logical_or.reduceat(filled, range(0, n, rows), 0)
    found = np.logical_or.reduceat(found, range(0, k, groups), 1)
    return found.repeat(rows, 0)[:n].repeat(groups, 1)[:, :k]


def _check_range(name: str, groups: Bytes) -> None:
    if groups.size and (int(groups.min()) < _LOWEST or int(groups.max()) > _HIGHEST):
        bad = groups[(groups < _LOWEST) | (groups > _HIGHEST)].flat[0]
        raise LowerError(
            f"weight format '{name}': scale out of range: got 2^{int(bad) - _ONE}, "
            f"want 2^{_LOWEST - _ONE} to 2^{_HIGHEST - _ONE}"
        )
