"""Block accounting: nothing lost, nothing freed twice, the lowest free block first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.blocks import BlockPool, BlockTable
from tilewright.runtime.errors import RequestError


def test_lowest_free_block_comes_first() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([2, 0])
    assert pool.allocate(3) == [0, 2, 4]
    pool.free([0, 2, 3])
    assert pool.allocate(3) == [0, 2, 3]
    assert pool.num_free == 1


def test_double_free_names_the_block() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    pool.free(pool.allocate(2))
    with pytest.raises(AssertionError, match="block 1 is freed but not held"):
        pool.free([1])


@pytest.mark.parametrize("block", [-1, 3])
def test_free_of_a_foreign_block_is_refused(block: int) -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    pool.allocate(3)
    with pytest.raises(AssertionError, match=f"block {block} of a pool of 3"):
        pool.free([block])


def test_allocating_too_much_takes_nothing() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    with pytest.raises(AssertionError, match="allocate 4 blocks of 3 free ones"):
        pool.allocate(4)
    assert pool.num_free == 3


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "message"),
    [
        (0, 4, "cache 'num_blocks': out of range: got 0, want at least 1"),
        (3, 0, "cache 'block_size': out of range: got 0, want at least 1"),
        (
            2**28,
            16,
            "cache 'num_blocks': slots do not fit in 32 bits: got 268435456 blocks of "
            "16 positions, want at most 2147483647 positions",
        ),
    ],
)
def test_bad_sizes_are_refused(num_blocks: int, block_size: int, message: str) -> None:
    with pytest.raises(RequestError) as error:
        BlockPool(num_blocks, block_size)
    assert str(error.value) == message


def test_slots_follow_the_table() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.allocate(1)
    first, second = BlockTable(pool), BlockTable(pool)
    first.grow(3)
    second.grow(4)
    first.grow(5)
    assert first.blocks.tolist() == [1, 3]
    assert first.slots(2, 5).tolist() == [6, 7, 12]
    assert first.slots(2, 5).dtype == np.int32
    with pytest.raises(AssertionError, match="positions 7 to 9 of a table of 2 blocks of 4"):
        first.slots(7, 9)


def test_table_grows_only_where_blocks_are_missing() -> None:
    pool = BlockPool(num_blocks=40, block_size=4)
    table = BlockTable(pool)
    assert table.num_missing(9) == 3
    table.grow(9)
    table.grow(12)
    table.grow(1)
    assert (table.num_blocks, table.num_missing(12), table.num_missing(13)) == (3, 0, 1)
    table.grow(160)
    assert table.blocks.tolist() == list(range(40))
    table.release()
    table.release()
    assert (table.num_blocks, pool.num_free) == (0, 40)


@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.just(0), st.integers(1, 30))), max_size=40
    ),
)
def test_every_block_is_free_or_in_one_table(
    num_blocks: int, block_size: int, moves: list[tuple[int, int]]
) -> None:
    pool = BlockPool(num_blocks, block_size)
    tables = [BlockTable(pool) for _ in range(4)]
    held: list[set[int]] = [set() for _ in tables]
    for index, positions in moves:
        table = tables[index]
        if positions == 0:
            table.release()
            held[index].clear()
        elif table.num_missing(positions) <= pool.num_free:
            free = sorted(set(range(num_blocks)).difference(*held))
            expected = free[: table.num_missing(positions)]
            before = table.num_blocks
            table.grow(positions)
            assert table.blocks[before:].tolist() == expected
            held[index].update(expected)
        blocks = [block for table in tables for block in table.blocks.tolist()]
        assert len(blocks) == len(set(blocks))
        assert len(blocks) + pool.num_free == num_blocks
        assert [set(table.blocks.tolist()) for table in tables] == held
