"""Host memory and the dtypes of memory: what every device shares.

Torch is imported when a tensor is asked for, since reading an artifact needs none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.errors import ArtifactError, RequestError

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
POISON = 0xFF  # every byte: NaN as f64, f32, f16 or bf16; -1 as an int
_HUGE_PAGE = 2 << 20


class MemoryType(NamedTuple):
    """A dtype as DLPack's type code and bits, as numpy's type and by the name of torch's."""

    code: int
    bits: int
    numpy: np.dtype[Any]
    torch_name: str

    @property
    def tensor_type(self) -> torch.dtype:
        """Torch's type."""
        import torch

        found: torch.dtype = getattr(torch, self.torch_name)
        return found


_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4  # DLDataTypeCode
_BYTE = MemoryType(_UINT, 8, np.dtype("u1"), "uint8")
TYPES: Mapping[str, MemoryType] = {
    "f64": MemoryType(_FLOAT, 64, np.dtype("f8"), "float64"),
    "f32": MemoryType(_FLOAT, 32, np.dtype("f4"), "float32"),
    "f16": MemoryType(_FLOAT, 16, np.dtype("f2"), "float16"),
    "bf16": MemoryType(_BFLOAT, 16, np.dtype("u2"), "bfloat16"),
    "fp8_e4m3": _BYTE,
    "fp8_e5m2": _BYTE,
    "ue8m0": _BYTE,
    "i64": MemoryType(_INT, 64, np.dtype("i8"), "int64"),
    "i32": MemoryType(_INT, 32, np.dtype("i4"), "int32"),
    "i8": MemoryType(_INT, 8, np.dtype("i1"), "int8"),
    "u8": _BYTE,
}


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Return numpy's type for the memory of a dtype: bf16 is uint16, the 8-bit floats are uint8."""
    return TYPES[dtype].numpy


def as_torch(array: Array, dtype: str) -> torch.Tensor:
    """Return a tensor over the same memory; bf16 memory, uint16 in numpy, becomes bfloat16."""
    import torch

    with warnings.catch_warnings():  # weights are read-only, which torch has no way to express
        warnings.filterwarnings("ignore", message=".*not writable.*")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


def allocate(num_bytes: int) -> Bytes:
    """Return zeroed bytes at a page boundary; pages cost memory only once touched.

    Raises RequestError if the system has no room for as many.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"engine 'memory': cannot be had: got a request for {num_bytes} bytes, want less "
            f"({error}); give a smaller cache_tokens, or compile for a smaller context"
        ) from None
    return np.frombuffer(pages, np.uint8, num_bytes)


def release_unused_memory() -> None:
    """Give freed heap pages back to the system: reading a tokenizer leaves many behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def map_file(path: Path) -> Bytes:
    """Map a file read-only; the kernel starts reading it ahead."""
    if path.stat().st_size == 0:
        return allocate(0)
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_WILLNEED"):
        pages.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(pages, np.uint8)


def allocate_huge(num_bytes: int) -> Bytes | None:
    """Return zeroed bytes in huge pages, None where the system has none to give.

    For what is streamed once a token: with 4 KB pages address translation takes part of the time.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or num_bytes < _HUGE_PAGE:
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, num_bytes + 2 * _HUGE_PAGE, flags=flags)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages
        return None
    whole = np.frombuffer(pages, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + num_bytes]


def allocate_streamed(num_bytes: int) -> Bytes:
    """Return bytes in pages as large as those that `load_file` puts weights in, where it can."""
    huge = allocate_huge(num_bytes)
    return allocate(num_bytes) if huge is None else huge


def load_file(path: Path) -> Bytes:
    """Return a file's bytes in huge pages if it is small beside this machine's memory, else mapped.
    """
    size = path.stat().st_size
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = allocate_huge(size) if size <= memory // 4 else None
    if found is None:
        return map_file(path)
    with path.open("rb") as file:
        if file.readinto(found.data) != size:
            raise ArtifactError(f"file '{path}': changed while it was read: want {size} bytes")
    found.flags.writeable = False
    return found
