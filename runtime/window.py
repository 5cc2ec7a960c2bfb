"""The window pages of one request: the newest positions only, older pages are given back.

Kernels see them as a ring: page n of a request (positions from n * page on) stands at n % width.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.blocks import BlockPool


class WindowTable:
    """Consecutive pages of one request, from the oldest that may still be read.

    The ring shows the newest `width` of them; a step reads and writes no others. Pages are counted
    from position `offset`; earlier ones are never held.
    """

    def __init__(self, pool: BlockPool, width: int, offset: int = 0) -> None:
        self._pool = pool
        self.offset = offset
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
        return self.offset + self._first * self._pool.block_size

    def num_missing(self, stop: int) -> int:
        """Pages to allocate before positions up to `stop` (exclusive) are held."""
        return max(self._pages_for(stop) - self._first - len(self._pages), 0)

    def room(self, num_free: int) -> int:
        """Positions that the pages held and `num_free` more reach up to (exclusive)."""
        pages = self._first + len(self._pages) + num_free
        return self.offset + pages * self._pool.block_size

    def grow(self, stop: int) -> None:
        """Hold positions up to `stop`; asserts that the pool has the pages."""
        for page in self._pool.allocate(self.num_missing(stop)):
            self._ring[(self._first + len(self._pages)) % len(self._ring)] = page
            self._pages.append(page)

    def release_before(self, position: int) -> None:
        """Give back the pages that hold only positions before `position`."""
        keep = (position - self.offset) // self._pool.block_size
        while self._first < keep and self._pages:
            self._pool.free([self._pages.popleft()])
            self._first += 1

    def truncate(self, stop: int) -> None:
        """Give back the pages that hold only positions from `stop` on."""
        keep = max(self._pages_for(stop) - self._first, 0)
        while len(self._pages) > keep:
            self._pool.free([self._pages.pop()])
        for number, page in enumerate(self._pages, self._first):  # pages the dropped ones hid
            self._ring[number % len(self._ring)] = page

    def restart(self, position: int) -> None:
        """Give all pages back and begin again with the page of `position`."""
        self._pool.free(self._pages)
        self._pages.clear()
        self._first = max(position - self.offset, 0) // self._pool.block_size

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of positions `start` to `stop` (exclusive), int64 [stop - start].

        slot = page * page size + place in the page; asserts that the table holds them.
        """
        size = self._pool.block_size
        assert self.start <= start <= stop <= self.room(0), (
            f"positions {start} to {stop} of a window of {self.start} to {self.room(0)}"
        )
        positions = np.arange(start, stop) - self.offset
        pages = np.array(self._pages or [0], np.int64)
        slots: NDArray[np.int64] = pages[positions // size - self._first] * size + positions % size
        return slots

    def _pages_for(self, stop: int) -> int:
        return self._pool.blocks_for(max(stop - self.offset, 0))
