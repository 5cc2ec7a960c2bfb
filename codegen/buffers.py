"""Buffers between kernels: how long each lives, and where it stands in the arena."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass(frozen=True)
class Lifetime:
    """A buffer is written by launch `first` and last read by launch `last`, inclusive."""

    name: str
    num_bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


def place(
    lifetimes: Sequence[Lifetime], clash: Callable[[Lifetime, Lifetime], bool] = Lifetime.overlaps
) -> tuple[Mapping[str, int], int]:
    """Return byte offsets and the arena's size; buffers that clash never share a byte: those alive
    at once, unless `clash` says otherwise.

    Largest first, each at the lowest gap that fits (greedy by size; Pisarchyk and Lee 2020).
    """
    placed: list[tuple[int, int, Lifetime]] = []
    offsets: dict[str, int] = {}
    for life in sorted(lifetimes, key=lambda b: (-b.num_bytes, b.first, b.name)):
        size = _aligned(max(life.num_bytes, 1))
        start = 0
        for begin, end, other in placed:
            if clash(life, other):
                if start + size <= begin:
                    break
                start = max(start, end)
        insort(placed, (start, start + size, life), key=lambda p: p[:2])
        offsets[life.name] = start
    return offsets, max((end for _, end, _ in placed), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
