"""Host memory that is streamed: where it lies, and what it holds."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from tilewright.runtime.devices.memory import allocate_huge, load_file

HUGE = 2 << 20

needs_huge_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages"
)


@needs_huge_pages
@pytest.mark.parametrize("num_bytes", [HUGE, 3 * HUGE + 5])
def test_streamed_memory_begins_at_a_huge_page_and_is_zero(num_bytes: int) -> None:
    memory = allocate_huge(num_bytes)
    assert memory is not None
    assert memory.nbytes == num_bytes and memory.ctypes.data % HUGE == 0
    assert not memory.any()
    memory[-1] = 7
    assert memory[-1] == 7


def test_less_than_a_huge_page_gets_none() -> None:
    assert allocate_huge(HUGE - 1) is None


@pytest.mark.parametrize("num_bytes", [0, 100, HUGE + 3])
def test_a_file_is_read_whole_and_cannot_be_written(num_bytes: int, tmp_path: Path) -> None:
    want = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    path = tmp_path / "weights.bin"
    path.write_bytes(want.tobytes())
    found = load_file(path)
    assert np.array_equal(found, want)
    if num_bytes:
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 1
