"""Numbers of the Ascend 950, per core and cycle, and the cycles they imply.

Sources: docs/ascend950.md. What uses them is checked on a functional model, never run on an NPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CLOCK_HZ = 1.65e9
UB_BYTES = 253952
UB_BYTES_WITH_SIMT = 221184
L1_BYTES = 524288
L0_BYTES = 65536
L0C_BYTES = 262144
GM_RATE = 31.0  # bytes a cycle and core from memory
L0_RATE = 256.0
L0C_TO_UB_RATE = 256.0  # both vector cores together
VECTOR_RATE = 256.0
TRANSFER_CYCLES = 41.0  # 25 ns to start one
MATRIX_START = 60.0
FRACTAL = 16
BF16_K = 16  # of K that one cycle takes, for 16 x 16 results
MX_K = 32  # of e4m3 codes


@dataclass(frozen=True)
class Tile:
    """A tile of a contraction: rows, columns, step of K."""

    bm: int
    bn: int
    bk: int

    def fits(self, anchors: int) -> bool:
        """Say whether two stages of the operands, and `anchors` accumulators, fit their
        memories."""
        operands = 2 * (self.bm + anchors * self.bn) * self.bk * 2
        halves = self.bm // 2 * self.bn * 4 * (2 * anchors + 2)
        return (
            operands <= L1_BYTES
            and max(self.bm, self.bn) * min(self.bk, 128) * 4 <= L0_BYTES
            and anchors * self.bm * self.bn * 4 <= L0C_BYTES
            and halves <= UB_BYTES_WITH_SIMT
        )

    def fits_coded(self, anchors: int, bits: int) -> bool:
        """Say the same where each vector core decodes half of a tile of codes of so many bits."""
        half = self.bn // 2 * self.bk
        scales = self.bk // 64 * max(32, self.bn)
        halves = 2 * (half * bits // 8 + scales + 2 * half) + self.bm // 2 * self.bn * 8 * anchors
        return (
            4 * (self.bm + self.bn) * self.bk <= L1_BYTES
            and 4 * max(self.bm, self.bn) * self.bk <= L0_BYTES
            and anchors * self.bm * self.bn * 4 <= L0C_BYTES
            and halves <= UB_BYTES_WITH_SIMT
        )

    def fits_mx(self, anchors: int, *, decoded: bool, direct: bool) -> bool:
        """Say the same of e4m3 codes on both sides, of which the vector cores make some."""
        w = 2 * self.bn * self.bk
        l1 = (2 * self.bm * self.bk + w) * 33 // 32 + (w if decoded and direct else 0)
        halves = (2 * w // 2 if decoded else 0) + self.bm // 2 * self.bn * 8 * anchors
        return (
            l1 <= L1_BYTES
            and 2 * max(self.bm, self.bn) * self.bk <= L0_BYTES
            and anchors * self.bm * self.bn * 4 <= L0C_BYTES
            and halves <= UB_BYTES_WITH_SIMT
        )


def contract_cycles(
    tile: Tile, *, rows: int, n: int, k: int, anchors: int, cores: int, mx_bits: int = 0
) -> float:
    """Return modelled cycles of [rows, k] times [n, k]^T: the slower of loading and computing for
    each step, then the epilogue, for the core with most tiles. `mx_bits`: of a weight's code in the
    MX form; 0 is bf16 on both sides."""
    tiles = -(-rows // tile.bm) * -(-n // tile.bn)
    steps = -(-k // tile.bk)
    x_rows, x_bytes, w_bytes, unit_k = float(tile.bm), 2.0, 2.0, BF16_K
    if mx_bits:  # only rows that there are; a scale for each 32
        x_rows, unit_k = min(rows, tile.bm), MX_K
        x_bytes, w_bytes = 33 / 32, mx_bits / 8 + 1 / 32
    starts = 2 + 2 * (mx_bits > 0)  # scales are transfers of their own
    loaded = (x_rows * x_bytes + anchors * tile.bn * w_bytes) * tile.bk
    load = starts * TRANSFER_CYCLES + loaded / GM_RATE
    fractals = tile.bm / FRACTAL * tile.bn / FRACTAL * tile.bk / unit_k
    compute = anchors * (fractals + MATRIX_START)
    result = tile.bm * tile.bn * 4
    epilogue = result * anchors / L0C_TO_UB_RATE + 2 * result / GM_RATE / 2
    return -(-tiles // cores) * (steps * max(load, compute) + epilogue)


_SIDES = (32, 64, 128)
_TILES = [Tile(bm, bn, bk) for bm in _SIDES for bn in _SIDES for bk in (64, 128, 256)]
_MX_TILES = [Tile(bm, bn, bk) for bm in _SIDES for bn in _SIDES for bk in (64, 128, 256, 512)]


def best_tile(*, n: int, k: int, anchors: int, cores: int) -> Tile:
    """Return the tile for one weight shape: fastest over a step of 16 and one of 512 rows, equally
    weighted. It cannot depend on the batch: on a chip nobody has run, tiles may decide bits."""
    return _fastest([t for t in _TILES if t.fits(anchors)], n, k, anchors, cores)


def best_coded_tile(*, n: int, k: int, anchors: int, cores: int, bits: int) -> Tile:
    """The same for weights of so many bits that the vector cores decode: whole steps of K stand in
    L0, codes and decoded tiles in two stages beside the sums in the unified buffer."""
    return _fastest([t for t in _TILES if t.fits_coded(anchors, bits)], n, k, anchors, cores)


def best_mx_tile(
    *, n: int, k: int, anchors: int, cores: int, bits: int, decoded: bool
) -> Tile:
    """The same in the MX form, for weights of so many bits; vector cores decode some of them."""
    direct = bits == 8
    tiles = [t for t in _MX_TILES if t.fits_mx(anchors, decoded=decoded, direct=direct)]
    return _fastest(tiles, n, k, anchors, cores, mx_bits=bits)


def _fastest(
    candidates: Sequence[Tile], n: int, k: int, anchors: int, cores: int, mx_bits: int = 0
) -> Tile:
    def cost(tile: Tile) -> tuple[float, int, int, int]:
        few, many = (
            contract_cycles(
                tile, rows=rows, n=n, k=k, anchors=anchors, cores=cores, mx_bits=mx_bits
            )
            for rows in (16, 512)
        )
        ragged = (n % tile.bn != 0) + (k % tile.bk != 0)
        return few + many / 32, ragged, tile.bm, tile.bn

    return min(candidates, key=cost)
