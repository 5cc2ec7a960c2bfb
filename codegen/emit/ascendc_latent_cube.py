"""Attention whose keys are its values with both products on the matrix unit: how much of it stands
where. Chosen from the shape alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.codegen.emit.ascendc_host import Launch
from tilewright.codegen.emit.ascendc_latent import Latent
from tilewright.codegen.emit.ascendc_memory import UB_BYTES, aligned
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.errors import LowerError

FRACTAL, MOST_HEADS, L1_BYTES, L0_BYTES, L0C_BYTES = 16, 64, 524288, 65536, 262144
PARTS = 3  # bf16 parts of an fp32 weight
# Rows of a tile, rows decoded at once, columns of one product of scores and of results.
_SIZES = [
    (tile, sub, kp, np)
    for tile in (128, 64, 32)
    for np in (128, 64, 32, 16)
    for sub in (tile // 2, tile // 4)
    if sub >= FRACTAL
    for kp in (128, 64, 32, 16)
]


@dataclass(frozen=True)
class CubeSizes:
    """`m` heads with padding, and the sizes above; bytes of a head's row and of a packed row."""

    group: int
    m: int
    tile: int
    sub: int
    kp: int
    np: int
    width: int
    raw_bytes: int
    out_bytes: int

    @property
    def buffer(self) -> dict[str, int]:
        """Parts of the unified buffer of one vector core, in bytes."""
        half = self.m // 2
        return {
            "raw": self.sub * self.raw_bytes,
            "rows": self.sub * self.width * 2,
            "scores": half * self.tile * 4,
            "weights": PARTS * half * self.tile * 2,
            "sums": half * self.width * 4,
            "products": 2 * half * self.np * 4,
            "state": half * 12,
            "out": half * self.width * self.out_bytes,
        }

    @property
    def l1(self) -> dict[str, int]:
        return {
            "q": self.m * self.width * 2,
            "rows": 2 * self.tile * self.width * 2,
            "weights": PARTS * self.m * self.tile * 2,
        }

    @property
    def slot_a(self) -> int:
        return self.m * max(self.kp, self.tile) * 2

    @property
    def slot_b(self) -> int:
        return self.tile * max(self.kp, self.np) * 2

    @property
    def fits(self) -> bool:
        return (
            self.width % self.kp == 0
            and self.width % self.np == 0
            and sum(map(aligned, self.buffer.values())) <= UB_BYTES
            and sum(self.l1.values()) <= L1_BYTES
            and 2 * max(self.slot_a, self.slot_b) <= L0_BYTES
            and self.m * (self.tile + 2 * self.np) * 4 <= L0C_BYTES
        )


def _candidates(found: Latent, chunk: int) -> Iterator[CubeSizes]:
    raw = max(row.row_stride for row in found.lists)
    out = SIZES[found.stored(found.out).ctype]
    groups = [g for g in range(min(found.heads, MOST_HEADS), 0, -1) if found.heads % g == 0]
    for group in groups:
        m = -(-group // FRACTAL) * FRACTAL
        for tile, sub, kp, np in _SIZES:
            if tile <= max(32, chunk):
                yield CubeSizes(group, m, tile, sub, kp, np, found.width, raw, out)


def refuses_cube(body: Graph) -> str | None:
    """Say why an attention does not go to the matrix unit: it takes bf16 on both sides, rows of
    whole fractals."""
    found = Latent.of(body)
    if found.stored(found.anchor.inputs[0]).ctype != "uint16_t" or found.cell != "uint16_t":
        return "rows or queries are f32, want bf16 or codes"
    if found.width % FRACTAL:
        return f"rows have {found.width} values, want a multiple of {FRACTAL}"
    if not any(sizes.fits for sizes in _candidates(found, 32)):
        return f"{found.heads} heads of {found.width} do not fit the memories"
    return None


def latent_cube(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    found = Latent.of(spec.body)
    sizes = next((s for s in _candidates(found, spec.numerics.chunk) if s.fits), None)
    if sizes is None:
        raise LowerError(f"attend kernel '{spec.symbol}': {refuses_cube(spec.body)}")
    return found.render(
        spec.symbol, "ascendc/latent_cube.asc.j2", kind="mix", group=sizes.group, m=sizes.m,
        tile=sizes.tile, sub=sizes.sub, kp=sizes.kp, np=sizes.np, slot_a=sizes.slot_a,
        slot_b=sizes.slot_b, offsets=stacked(sizes.buffer), at=stacked(sizes.l1),
    )  # fmt: skip


def stacked(sizes: dict[str, int]) -> dict[str, int]:
    """Return where each part starts, one after the other."""
    places, at = {}, 0
    for part, num_bytes in sizes.items():
        places[part] = at
        at += aligned(num_bytes)
    return places
