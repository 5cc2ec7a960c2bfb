"""The window pages of one request: the newest positions only, older pages are given back.

Kernels see them as a ring: page n of a request (positions from n * page on) stands at n % width.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.blocks import BlockPool


class WindowTable:
    """Consecutive pages of one request, from the oldest that may still be read.

    The ring shows the newest `width` of them; a step reads and writes no others.
    """

    def __init__(self, pool: BlockPool, width: int) -> None:
        self._pool = pool
        self._first = 0  # number of the oldest page held
        self._pages: deque[int] = deque()
        self._ring = np.zeros(width, np.int32)

    @property
    def ring(self) -> NDArray[np.int32]:
        """Pages as kernels look them up, int32 [width]: a view, valid until the next change."""
        return self._ring

    @property
    def pages(self) -> tuple[int, ...]:
        """Page ids in order of position."""
        return tuple(self._pages)

    @property
    def start(self) -> int:
        """The oldest position held, or the next one if there are none."""
        return self._first * self._pool.block_size

    def num_missing(self, num_positions: int) -> int:
        """Pages to allocate before positions up to `num_positions` are held."""
        return max(self._pool.blocks_for(num_positions) - self._first - len(self._pages), 0)

    def room(self, num_free: int) -> int:
        """Positions that the pages held and `num_free` more reach up to (exclusive)."""
        return (self._first + len(self._pages) + num_free) * self._pool.block_size

    def grow(self, num_positions: int) -> None:
        """Hold positions up to `num_positions`; asserts that the pool has the pages."""
        for page in self._pool.allocate(self.num_missing(num_positions)):
            self._ring[(self._first + len(self._pages)) % len(self._ring)] = page
            self._pages.append(page)

    def release_before(self, position: int) -> None:
        """Give back the pages that hold only positions before `position`."""
        keep = position // self._pool.block_size
        while self._first < keep and self._pages:
            self._pool.free([self._pages.popleft()])
            self._first += 1

    def truncate(self, num_positions: int) -> None:
        """Give back the pages that hold only positions from `num_positions` on."""
        keep = max(self._pool.blocks_for(num_positions) - self._first, 0)
        while len(self._pages) > keep:
            self._pool.free([self._pages.pop()])
        for number, page in enumerate(self._pages, self._first):  # pages the dropped ones hid
            self._ring[number % len(self._ring)] = page

    def restart(self, position: int) -> None:
        """Give all pages back and begin again with the page of `position`."""
        self._pool.free(self._pages)
        self._pages.clear()
        self._first = position // self._pool.block_size

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of positions `start` to `stop` (exclusive), int64 [stop - start].

        slot = page * page size + position % page size; asserts that the table holds them.
        """
        size = self._pool.block_size
        assert self.start <= start <= stop <= self.room(0), (
            f"positions {start} to {stop} of a window of {self.start} to {self.room(0)}"
        )
        positions = np.arange(start, stop)
        pages = np.array(self._pages or [0], np.int64)
        slots: NDArray[np.int64] = (
            pages[positions // size - self._first] * size + positions % size
        )
        return slots
