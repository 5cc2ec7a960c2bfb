"""A request at a position, kept so that it can be computed on from there with the bits of a fresh
one: references to its blocks, and a copy of the window rows that later tokens may read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from tilewright.runtime.artifact import StateRecord

Rows = NDArray[Any]


@dataclass(eq=False, slots=True)
class Snapshot:
    """The first `position` positions of a request. Belongs to the cache, which may drop it.

    `blocks` may hold newer entries too: nothing before `position` reads them. `rows`: by state, the
    window rows from `first_row` on. `tail_start`: where the tail begins that some of them are of.
    """

    position: int
    blocks: tuple[int, ...]
    rows: Mapping[str, Rows]
    tail_start: int = 0
    is_dropped: bool = field(default=False, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copied rows."""
        return sum(rows.nbytes for rows in self.rows.values())


class CacheMemory(Protocol):
    """The states where they lie. Calls come between two steps and take effect in order."""

    @property
    def window_states(self) -> Sequence[StateRecord]:
        """The states of scope window."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every state of scope block."""

    def read_rows(self, state: str, slots: NDArray[Any]) -> Rows:
        """Return a copy of the rows in `slots` of a window state, one row each."""

    def write_rows(self, state: str, slots: NDArray[Any], rows: Rows) -> None:
        """Store such rows in `slots`."""


def first_row(state: StateRecord, position: int) -> int:
    """Return the oldest position whose row of a window state a token at `position` or later reads.

    Rows are read in groups of `state.group` positions; the one that `position` stands in is
    incomplete, and `window - group` positions before it may be read with it.
    """
    begun = position // state.group * state.group
    return max(begun - (state.window - state.group), 0)
