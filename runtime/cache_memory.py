"""Copies between the states of an executor and snapshots, where states are host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.cache_layout import CacheLayout
from tilewright.runtime.snapshot import Rows

Slots = NDArray[Any]


class StateMemory:
    """The states of both pools, live arrays `[pages, .., entries, width]` that `state` returns by
    name."""

    def __init__(self, state: Callable[[str], NDArray[Any]], layout: CacheLayout) -> None:
        self._state = state
        self._block_states = layout.blocks.states
        self.window_states = layout.window.states if layout.window else ()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every state of scope block."""
        for state in self._block_states:
            array = self._state(state.name)
            for source, target in pairs:
                array[target] = array[source]

    def read_rows(self, state: str, slots: Slots) -> Rows:
        """Return a copy of the rows in `slots`, one row each."""
        rows, pages, entries = self._locate(state, slots)
        return np.array(rows[pages, entries])

    def write_rows(self, state: str, slots: Slots, rows: Rows) -> None:
        """Store such rows in `slots`."""
        found, pages, entries = self._locate(state, slots)
        found[pages, entries] = rows

    def _locate(self, state: str, slots: Slots) -> tuple[NDArray[Any], Slots, Slots]:
        array = np.moveaxis(self._state(state), -2, 1)  # entries after pages
        return array, *np.divmod(slots, array.shape[1])
