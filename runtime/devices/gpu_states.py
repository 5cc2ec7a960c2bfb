"""Copies between the states on a GPU and snapshots, which are kept on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.runtime.cache_layout import CacheLayout
from tilewright.runtime.devices.chip import Chip
from tilewright.runtime.snapshot import Rows


class GpuStateMemory:
    """The states of both pools, tensors `[pages, .., entries, width]` that `view` returns by name.

    Work goes to the stream that steps run on, so that it takes effect between two of them.
    """

    def __init__(
        self, chip: Chip, view: Callable[[str], torch.Tensor], layout: CacheLayout
    ) -> None:
        self._chip = chip
        self._view = view
        self._block_states = layout.blocks.states
        self.window_states = layout.window.states if layout.window else ()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every state of scope block."""
        with self._chip.active():
            sources, targets = (self._index(np.array(ids)) for ids in zip(*pairs, strict=True))
            for state in self._block_states:
                pages = self._view(state.name)
                pages.index_copy_(0, targets, pages.index_select(0, sources))

    def read_rows(self, state: str, slots: NDArray[Any]) -> Rows:
        """Return a copy of the rows in `slots`, one row each; bf16 as uint16."""
        with self._chip.active():
            rows, pages, entries = self._locate(state, slots)
            found = rows[pages, entries].to("cpu", copy=True)
            array: Rows = _bits(found).numpy()
            return array

    def write_rows(self, state: str, slots: NDArray[Any], rows: Rows) -> None:
        """Store such rows in `slots`."""
        with self._chip.active():
            found, pages, entries = self._locate(state, slots)
            given = torch.from_numpy(np.ascontiguousarray(rows)).to(self._chip.device)
            _bits(found)[pages, entries] = given

    def _locate(
        self, state: str, slots: NDArray[Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        view = self._view(state).movedim(-2, 1)  # entries after pages
        pages, entries = np.divmod(slots, view.shape[1])
        return view, self._index(pages), self._index(entries)

    def _index(self, numbers: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._chip.device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that numpy has."""
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
