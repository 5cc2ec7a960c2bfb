"""Attention whose keys are its values with both products on the matrix unit: how much of it stands
where. Chosen from the shape alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.codegen.emit.ascendc_cube import FRACTAL, PARTS, CubeTile
from tilewright.codegen.emit.ascendc_host import Launch
from tilewright.codegen.emit.ascendc_latent import Latent
from tilewright.codegen.emit.ascendc_memory import stacked
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.errors import LowerError

MOST_HEADS = 64
# Rows of a tile, rows decoded at once, columns of one product of scores and of results.
_SIZES = [
    (tile, sub, kp, np)
    for tile in (128, 64, 32)
    for np in (128, 64, 32, 16)
    for sub in (tile // 2, tile // 4)
    if sub >= FRACTAL
    for kp in (128, 64, 32, 16)
]


@dataclass(frozen=True, kw_only=True)
class CubeSizes(CubeTile):
    """Of packed rows: `group` heads of an item, `sub` rows decoded at once, bytes of a packed row.
    """

    group: int
    sub: int
    raw_bytes: int

    @property
    def buffer(self) -> dict[str, int]:
        half = self.m // 2
        return {
            "raw": self.sub * self.raw_bytes,
            "rows": self.sub * self.width * 2,
            **self.products,
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


def _candidates(found: Latent, chunk: int) -> Iterator[CubeSizes]:
    raw = max(row.row_stride for row in found.lists)
    out = SIZES[found.stored(found.out).ctype]
    groups = [g for g in range(min(found.heads, MOST_HEADS), 0, -1) if found.heads % g == 0]
    for group in groups:
        m = -(-group // FRACTAL) * FRACTAL
        for tile, sub, kp, np in _SIZES:
            if tile <= max(32, chunk):
                yield CubeSizes(
                    group=group, m=m, tile=tile, sub=sub, kp=kp, np=np, width=found.width,
                    raw_bytes=raw, out_bytes=out,
                )  # fmt: skip


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
