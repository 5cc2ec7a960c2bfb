"""Pack fp8 (e4m3) and fp4 (e2m1) weights with power-of-two scales for GPU kernels, and back.

A word holds four fp8 codes or eight fp4 ones. A span is as many values of k as 32 words hold: plane
j of word i is k = 32 j + i of its span. Words lie [panel, span, 16 rows, 32]; after them, 256-byte
aligned, the scales, a byte per row and plane: [panel, span, planes / 4, 16 rows] of four bytes.
Absent rows and values of k are zeros. A stack of matrices is one after the other.

templates/triton/tw_codes.triton decodes to 2^-down of the value: an exact fp32 product of a code's
bits and a scale's. Bits of most codes lie in the word as they do in an fp32 number, the sign so far
above the rest, so that a shift and a mask are all it takes; the others fill the gaps, placed so
that one multiplication brings their parts together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.pack_cpu import Unpacked
from tilewright.graph.errors import LowerError

ROWS, PLANE = 16, 32
_WORD = np.dtype("<u4")
_UP = 102  # what is added to a ue8m0 byte, so that one product scales the bits of a code
_HIGHEST = 254 - _UP
_ONE = 127
Array = NDArray[Any]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class WordLayout:
    """One format: bits of a code, binary places values are down by, the lowest scale whose products
    are normal bf16, and where parts of each plane's code go: (bits, places up)."""

    code_bits: int
    down: int
    lowest: int
    planes: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def span(self) -> int:
        return len(self.planes) * PLANE


WORD_LAYOUTS = {
    "fp8_e4m3": WordLayout(
        8, 120 - _UP, 28,
        (((0x7F, 0), (0x80, 4)), ((0x7F, 12), (0x80, 16)), ((0xFF, 24),), ((0x0F, 7), (0xF0, 15))),
    ),
    "fp4_e2m1": WordLayout(
        4, 126 - _UP, 26,
        (((7, 0), (8, 6)), ((7, 3), (8, 9)), ((7, 6), (8, 12)), ((3, 13), (12, 8)),
         ((7, 16), (8, 22)), ((7, 19), (8, 25)), ((7, 22), (8, 28)), ((3, 29), (12, 24))),
    ),
}  # fmt: skip


def spans(name: str, k: int) -> int:
    """Return how many spans hold k values."""
    return -(-k // WORD_LAYOUTS[name].span)


def _cells(name: str, n: int, k: int) -> int:
    """Rows with those that fill the last panel, times spans."""
    return -(-n // ROWS) * ROWS * spans(name, k)


def scales_at(name: str, n: int, k: int) -> int:
    """Return where the scales of one packed [n, k] matrix start, in bytes."""
    return _cells(name, n, k) * PLANE * _WORD.itemsize


def matrix_bytes(name: str, n: int, k: int) -> int:
    """Return the size of one packed [n, k] matrix: a multiple of 256."""
    scales = _cells(name, n, k) * len(WORD_LAYOUTS[name].planes)
    return scales_at(name, n, k) + -(-scales // 256) * 256


def pack_words(name: str, found: Unpacked, block: tuple[int, int]) -> Bytes:
    """Pack bytes of codes [n, k] (fp4: [n, k / 2], even k in the low nibble) with one ue8m0 byte
    per `block` of rows and columns; blocks at the edges may be cut short.

    Raises LowerError if arrays do not fit, or for a scale out of the range that is decoded exactly
    (2^-99 to 2^25, whatever it scales); a scale of nothing but zeros does not count.
    """
    codes, groups = _codes(name, found), _spread(name, found, block)
    n, k = codes.shape
    layout, panels, count = WORD_LAYOUTS[name], -(-n // ROWS), len(WORD_LAYOUTS[name].planes)
    padded = np.pad(codes, ((0, -n % ROWS), (0, -k % layout.span)))
    planes = padded.reshape(panels, ROWS, -1, count, PLANE).transpose(0, 2, 1, 3, 4)
    words = np.zeros((panels, planes.shape[1], ROWS, PLANE), _WORD)
    for plane, parts in enumerate(layout.planes):
        code = planes[..., plane, :].astype(_WORD)
        for bits, up in parts:
            words |= (code & bits) << up
    empty = ~(codes & ((1 << (layout.code_bits - 1)) - 1)).reshape(n, -1, PLANE).any(-1)
    groups = np.where(empty, np.uint8(_ONE), groups)
    _check_range(name, groups)
    lifted = np.pad(groups + np.uint8(_UP), ((0, -n % ROWS), (0, -groups.shape[1] % count)))
    scales = lifted.reshape(panels, ROWS, -1, count // 4, 4).transpose(0, 2, 3, 1, 4)
    out = np.zeros(matrix_bytes(name, n, k), np.uint8)
    start, raw = scales_at(name, n, k), np.ascontiguousarray(scales).reshape(-1)
    out[:start] = words.reshape(-1).view(np.uint8)
    out[start : start + raw.size] = raw
    return out


def unpack_words(name: str, packed: Bytes, n: int, k: int) -> Unpacked:
    """Invert `pack_words` of one matrix: codes, and scales [n, k / 32]."""
    if packed.size != matrix_bytes(name, n, k):
        raise LowerError(
            f"weight format '{name}': size differs from [{n}, {k}]: got {packed.size} bytes, "
            f"want {matrix_bytes(name, n, k)}"
        )
    layout, panels, start = WORD_LAYOUTS[name], -(-n // ROWS), scales_at(name, n, k)
    words = packed[:start].view(_WORD).reshape(panels, -1, ROWS, PLANE)
    planes = [sum(words >> up & bits for bits, up in parts) for parts in layout.planes]
    codes: Array = np.stack(planes, 3).astype(np.uint8).transpose(0, 2, 1, 3, 4)
    codes = codes.reshape(panels * ROWS, -1)[:n, :k]
    raw = packed[start : start + _cells(name, n, k) * len(planes)]
    scales = raw.reshape(panels, -1, len(planes) // 4, ROWS, 4).transpose(0, 3, 1, 2, 4)
    scales = scales.reshape(panels * ROWS, -1)[:n, : k // PLANE] - np.uint8(_UP)
    if layout.code_bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return Unpacked(codes=np.ascontiguousarray(codes), d=np.ascontiguousarray(scales))


def _codes(name: str, found: Unpacked) -> Bytes:
    """Return one byte per code, [n, k]."""
    codes: Array | None = found.codes
    if codes is None or found.d is None:
        raise LowerError(f"weight format '{name}': codes or scales are missing")
    if WORD_LAYOUTS[name].code_bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
    if codes.dtype != np.uint8 or codes.ndim != 2 or codes.shape[1] % PLANE:
        raise LowerError(
            f"weight format '{name}': codes do not fit: got {codes.dtype} {list(codes.shape)}, "
            f"want bytes of whole groups of {PLANE} k"
        )
    return codes


def _spread(name: str, found: Unpacked, block: tuple[int, int]) -> Bytes:
    """Scales of blocks -> one per row and group of 32: [n, k / 32]."""
    codes, d, (rows, cols) = _codes(name, found), found.d, block
    n, k = codes.shape
    want = (-(-n // rows), -(-k // cols))
    if d is None or cols % PLANE or d.dtype != np.uint8 or d.shape != want:
        got = "none" if d is None else f"{d.dtype} {list(d.shape)}"
        raise LowerError(
            f"weight format '{name}': scales do not fit the codes: got {got}, "
            f"want uint8 {list(want)} for blocks of {rows}x{cols}"
        )
    return d.repeat(rows, 0)[:n].repeat(cols // PLANE, 1)[:, : k // PLANE]


def _check_range(name: str, groups: Bytes) -> None:
    lowest = WORD_LAYOUTS[name].lowest
    if groups.size and (int(groups.min()) < lowest or int(groups.max()) > _HIGHEST):
        bad = groups[(groups < lowest) | (groups > _HIGHEST)].flat[0]
        raise LowerError(
            f"weight format '{name}': scale out of range: got 2^{int(bad) - _ONE}, "
            f"want 2^{lowest - _ONE} to 2^{_HIGHEST - _ONE}"
        )
