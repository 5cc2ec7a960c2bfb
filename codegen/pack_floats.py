"""Pack fp8 (e4m3) and fp4 (e2m1) weights with power-of-two scales into CPU panels, and back.

templates/cpp/tw_contract_formats.h states the layout. Codes are moved, never decoded.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.graph.errors import LowerError

PANEL, GROUP = 16, 32
CODE_BYTES = {"fp8": GROUP, "fp4": GROUP // 2}  # of one column in a group
_PLACES = np.array([0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15])
Array = NDArray[Any]
Bytes = NDArray[np.uint8]


def pack_floats(format: str, codes: Bytes, d: Bytes, block: tuple[int, int]) -> Bytes:
    """Pack codes with their scales: uint8 [panels, groups of 32 k, bytes of a group].

    fp8: `codes` [N, K]; fp4: [N, K / 2], even k in the low nibble. `d` are ue8m0 bytes, one per
    block of rows and columns of the weight; blocks at the edges may be cut short. Raises
    LowerError if the arrays do not fit.
    """
    width = CODE_BYTES[format]
    if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] % width:
        raise LowerError(
            f"packed format '{format}': codes do not fit: got {codes.dtype} {list(codes.shape)}, "
            f"want bytes of whole groups of {GROUP} k"
        )
    n, groups = codes.shape[0], codes.shape[1] // width
    panels = -(-n // PANEL)
    out = np.zeros((panels, groups, PANEL * (1 + width)), np.uint8)
    out[:, :, :PANEL] = _lanes(_spread(format, d, block, n, groups))
    lanes = _lanes(codes.view("<u4") if format == "fp8" else _swapped(codes.view("<u2")))
    if format == "fp4":
        lanes = lanes[..., _PLACES]
    out[:, :, PANEL:] = np.ascontiguousarray(lanes).view(np.uint8).reshape(panels, groups, -1)
    return out


def unpack_floats(format: str, packed: Bytes, n: int, k: int) -> tuple[Bytes, Bytes]:
    """Invert `pack_floats`: codes, and scales [n, k / 32]. The size must be that of [n, k]."""
    width = CODE_BYTES[format]
    blocks = packed.reshape(-1, k // GROUP, PANEL * (1 + width))
    scales = blocks[:, :, :PANEL].transpose(0, 2, 1).reshape(-1, k // GROUP)[:n]
    codes = np.ascontiguousarray(blocks[:, :, PANEL:])
    lanes: Array = codes.view("<u4" if format == "fp8" else "<u2")
    lanes = lanes.reshape(len(blocks), -1, PANEL)
    if format == "fp4":
        lanes = lanes[..., _PLACES]  # a swap is its own inverse
    columns = np.ascontiguousarray(lanes.transpose(0, 2, 1))
    found = (columns if format == "fp8" else _swapped(columns)).view(np.uint8)
    return found.reshape(-1, found.shape[-1])[:n], scales


def _swapped(quads: Array) -> Array:
    """Four codes in 16 bits with the middle two exchanged; its own inverse."""
    middle: Array = (quads & 0x0F00) >> 4 | (quads & 0x00F0) << 4
    return quads & 0xF00F | middle


def _spread(format: str, d: Bytes, block: tuple[int, int], n: int, groups: int) -> Bytes:
    """Scales of blocks -> one per row and group: [n, groups]."""
    rows, cols = block
    want = (-(-n // rows), -(-groups * GROUP // cols))
    if cols % GROUP or d.dtype != np.uint8 or d.shape != want:
        raise LowerError(
            f"packed format '{format}': shape of 'd' does not fit the codes: "
            f"got {d.dtype} {list(d.shape)}, want uint8 {list(want)} for blocks of {rows}x{cols}"
        )
    return d.repeat(rows, 0)[:n].repeat(cols // GROUP, 1)[:, :groups]


def _lanes(matrix: Array) -> Array:
    """[N, J] -> [panel, J, 16], absent rows zero."""
    absent = -matrix.shape[0] % PANEL
    padded = np.pad(matrix, ((0, absent), (0, 0))) if absent else matrix
    return padded.reshape(-1, PANEL, matrix.shape[1]).transpose(0, 2, 1)
