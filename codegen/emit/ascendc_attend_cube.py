"""Attention over paged keys and values with both products on the matrix unit: how much of it stands
where. Chosen from the shape alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.codegen.emit.ascendc_attend import Paged
from tilewright.codegen.emit.ascendc_cube import FRACTAL, PARTS, CubeTile
from tilewright.codegen.emit.ascendc_host import Launch
from tilewright.codegen.emit.ascendc_memory import stacked
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.errors import LowerError

MOST_ROWS = 64  # of tokens and heads at once


@dataclass(frozen=True, kw_only=True)
class AttendSizes(CubeTile):
    """Of paged keys and values: `tokens` of an item."""

    tokens: int

    @property
    def buffer(self) -> dict[str, int]:
        half = self.m // 2
        return {**self.products, "state": half * 16, "out": half * self.width * self.out_bytes}

    @property
    def l1(self) -> dict[str, int]:
        cached = 2 * self.tile * self.width * 2
        return {
            "q": self.m * self.width * 2,
            "keys": cached,
            "values": cached,
            "weights": PARTS * self.m * self.tile * 2,
        }


def _candidates(found: Paged, chunk: int) -> Iterator[AttendSizes]:
    sizes, out_bytes = found.sizes, SIZES[found.stored(found.out).ctype]
    group, width = sizes["heads"] // sizes["kv_heads"], sizes["width"]
    for most in (MOST_ROWS, MOST_ROWS // 2, FRACTAL):
        tokens = max(1, most // group)
        m = -(-tokens * group // FRACTAL) * FRACTAL
        for columns in (128, 64, 32, 16):
            yield AttendSizes(
                tokens=tokens, m=m, tile=chunk, kp=columns, np=columns, width=width,
                out_bytes=out_bytes,
            )  # fmt: skip


def refuses_cube(body: Graph) -> str | None:
    """Say why an attention does not go to the matrix unit: it takes bf16 on both sides, rows of
    whole fractals."""
    found = Paged.of(body)
    if {found.stored(n).ctype for n in found.anchor.inputs[:3]} != {"uint16_t"}:
        return "cache or queries are f32, want bf16"
    if found.sizes["width"] % FRACTAL:
        return f"heads have {found.sizes['width']} values, want a multiple of {FRACTAL}"
    if not any(sizes.fits for sizes in _candidates(found, 128)):
        return f"heads of {found.sizes['width']} do not fit the memories"
    return None


def attend_cube(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    found, chunk = Paged.of(spec.body), spec.numerics.chunk
    sizes = next((s for s in _candidates(found, chunk) if s.fits), None)
    if sizes is None or chunk % FRACTAL or chunk % found.sizes["block_size"]:
        raise LowerError(
            f"attend kernel '{spec.symbol}': a chunk of {chunk} does not fit the memories: want a "
            f"multiple of {FRACTAL} and of a page of {found.sizes['block_size']}"
        )
    return found.render(
        spec.symbol, "ascendc/attend_cube.asc.j2", "mix", chunk=chunk, tokens=sizes.tokens,
        m=sizes.m, kp=sizes.kp, np=sizes.np, slot_a=sizes.slot_a, slot_b=sizes.slot_b,
        group=found.sizes["heads"] // found.sizes["kv_heads"], offsets=stacked(sizes.buffer),
        at=stacked(sizes.l1),
    )  # fmt: skip
