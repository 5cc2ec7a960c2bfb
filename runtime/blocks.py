"""Accounting of the paged cache: which blocks are free, and who holds the others.

A block is `block_size` positions of one request. Every block is free or has holders: one table, and
snapshots that share it. A violation is our own mistake and fails with an AssertionError that names
the block.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.errors import RequestError


class BlockPool:
    """A fixed number of blocks; the lowest-numbered free block is handed out first.

    Allocating or freeing one block costs O(log num_blocks).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, count in (("num_blocks", num_blocks), ("block_size", block_size)):
            if count < 1:
                raise RequestError(f"cache '{name}': out of range: got {count}, want at least 1")
        if num_blocks * block_size > np.iinfo(np.int32).max:
            raise RequestError(
                f"cache 'num_blocks': slots do not fit in 32 bits: got {num_blocks} blocks of "
                f"{block_size} positions, want at most {np.iinfo(np.int32).max} positions"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # ascending, hence already a heap
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that hold `num_positions` positions."""
        return -(-num_positions // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take the lowest-numbered free blocks, ascending; asserts that there are enough."""
        assert 0 <= num_blocks <= len(self._free), (
            f"allocate {num_blocks} blocks of {len(self._free)} free ones"
        )
        blocks = [heappop(self._free) for _ in range(num_blocks)]
        for block in blocks:
            assert not self._holders[block], f"block {block} was free and held at once"
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks that are held; each must be freed once more."""
        for block in blocks:
            self._check_held(block, "shared")
            self._holders[block] += 1

    def num_holders(self, block: int) -> int:
        """How many hold the block; nobody may write one that more than one holds."""
        return self._holders[block]

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds the block."""
        return self._holders[block] > 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, each free once its last holder did; asserts that each is held."""
        for block in blocks:
            self._check_held(block, "freed")
            self._holders[block] -= 1
            if not self._holders[block]:
                heappush(self._free, block)

    def _check_held(self, block: int, what: str) -> None:
        assert 0 <= block < self.num_blocks, f"block {block} of a pool of {self.num_blocks}"
        assert self._holders[block], f"block {block} is {what} but not held"


class BlockTable:
    """The blocks of one request: position p lives in block p // block_size of the table."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._ids = np.zeros(8, np.int32)
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Block ids in order of position, int32 [num_blocks]: a view, valid until the next grow."""
        return self._ids[: self._num_blocks]

    def num_missing(self, num_positions: int) -> int:
        """Blocks to allocate before the table holds `num_positions` positions."""
        return max(self._pool.blocks_for(num_positions) - self._num_blocks, 0)

    def grow(self, num_positions: int) -> None:
        """Hold at least `num_positions` positions; asserts that the pool has the blocks."""
        missing = self.num_missing(num_positions)
        if missing:
            self._extend(self._pool.allocate(missing))

    def adopt(self, blocks: Sequence[int]) -> None:
        """Begin an empty table with blocks that others hold too."""
        assert self._num_blocks == 0, f"adopt blocks into a table of {self._num_blocks}"
        self._pool.share(blocks)
        self._extend(blocks)

    def _extend(self, blocks: Sequence[int]) -> None:
        end = self._num_blocks + len(blocks)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(end, np.int32)])
        self._ids[self._num_blocks : end] = blocks
        self._num_blocks = end

    def shared_from(self, position: int) -> list[int]:
        """Indices of the table's blocks from that of `position` on that others hold too."""
        first = position // self._pool.block_size
        later = self._ids[first : self._num_blocks].tolist()
        return [first + i for i, block in enumerate(later) if self._pool.is_shared(block)]

    def unshare(self, index: int) -> tuple[int, int]:
        """Put a fresh block in place of a shared one; returns both, the shared one first.

        The caller copies the content.
        """
        old = int(self._ids[index])
        assert self._pool.is_shared(old), f"block {old} has one holder"
        (new,) = self._pool.allocate(1)
        self._pool.free([old])
        self._ids[index] = new
        return old, new

    def truncate(self, num_positions: int) -> None:
        """Give back the blocks that hold only positions from `num_positions` on."""
        keep = self._pool.blocks_for(num_positions)
        if keep < self._num_blocks:
            self._pool.free(self._ids[keep : self._num_blocks].tolist())
            self._num_blocks = keep

    def release(self) -> None:
        """Give all blocks back; the table is then empty and may grow again."""
        self.truncate(0)

    def slots(self, start: int, stop: int) -> NDArray[np.int32]:
        """Cache slots of positions `start` to `stop` (exclusive), int32 [stop - start].

        slot = block * block_size + position % block_size; asserts that the table holds them.
        """
        size = self._pool.block_size
        assert 0 <= start <= stop <= self._num_blocks * size, (
            f"positions {start} to {stop} of a table of {self._num_blocks} blocks of {size}"
        )
        positions = np.arange(start, stop, dtype=np.int32)
        slots: NDArray[np.int32] = self._ids[positions // size] * size + positions % size
        return slots
