"""What attention on the matrix unit takes of its memories: two products of tiles in turn, scores of
rows with keys and sums of weights with values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tilewright.codegen.emit.ascendc_memory import UB_BYTES, stacked_bytes

FRACTAL, L1_BYTES, L0_BYTES, L0C_BYTES = 16, 524288, 65536, 262144
PARTS = 3  # bf16 parts of an fp32 weight


@dataclass(frozen=True, kw_only=True)
class CubeTile(ABC):
    """`m` rows with padding meet `tile` entries of `width` values; `kp` columns of one product of
    scores and `np` of one of results; bytes of a result."""

    m: int
    tile: int
    kp: int
    np: int
    width: int
    out_bytes: int

    @property
    @abstractmethod
    def buffer(self) -> dict[str, int]:
        """Parts of the unified buffer of one vector core, in bytes."""

    @property
    @abstractmethod
    def l1(self) -> dict[str, int]:
        """Parts of L1, in bytes."""

    @property
    def products(self) -> dict[str, int]:
        """Parts of the unified buffer that every attention has: its core's half of the rows."""
        half = self.m // 2
        return {
            "scores": half * self.tile * 4,
            "weights": PARTS * half * self.tile * 2,
            "sums": half * self.width * 4,
            "products": 2 * half * self.np * 4,
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
            and stacked_bytes(self.buffer) <= UB_BYTES
            and sum(self.l1.values()) <= L1_BYTES
            and 2 * max(self.slot_a, self.slot_b) <= L0_BYTES
            and self.m * (self.tile + 2 * self.np) * 4 <= L0C_BYTES
        )
