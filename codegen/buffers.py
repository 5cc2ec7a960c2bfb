"""Buffers between kernels: how long each lives, and where it stands in the arena."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

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


def clashing(
    lifetimes: Sequence[Lifetime], clash: Callable[[Lifetime, Lifetime], bool] = Lifetime.overlaps
) -> Mapping[str, Collection[str]]:
    """Map every buffer to those that it never shares a byte with: those alive at once, unless
    `clash` says otherwise."""
    found: dict[str, list[str]] = {life.name: [] for life in lifetimes}
    for one, other in combinations(lifetimes, 2):
        if clash(one, other):
            found[one.name].append(other.name)
            found[other.name].append(one.name)
    return found


def place(
    lifetimes: Sequence[Lifetime], apart: Mapping[str, Collection[str]]
) -> tuple[Mapping[str, int], int]:
    """Return byte offsets and the arena's size; buffers that `apart` names for each other never
    share a byte.

    Largest first, each at the lowest gap that fits (greedy by size; Pisarchyk and Lee 2020).
    """
    spans: dict[str, tuple[int, int]] = {}
    for life in sorted(lifetimes, key=lambda b: (-b.num_bytes, b.first, b.name)):
        size = _aligned(max(life.num_bytes, 1))
        start = 0
        for begin, end in sorted(spans[name] for name in apart[life.name] if name in spans):
            if start + size <= begin:
                break
            start = max(start, end)
        spans[life.name] = start, start + size
    offsets = {name: begin for name, (begin, _) in spans.items()}
    return offsets, max((end for _, end in spans.values()), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
