"""The CPU as a device: memory, the kernels' library, its thread pool, prepared launches.

The structures below mirror the C headers of TVM-FFI and templates/cpp/tw_host.cpp. A prepared step
is arrays of them, so that running it is one foreign call.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from tilewright.runtime.artifact import Extent, TargetRecord, evaluate
from tilewright.runtime.devices import ascend950_model
from tilewright.runtime.errors import ArtifactError

Array = NDArray[Any]
_HUGE_PAGE = 2 << 20
Bytes = NDArray[np.uint8]

MAX_THREADS = 1024
_ERROR_BYTES = 1024
_TENSOR_INDEX, _INT_INDEX = 7, 1  # kTVMFFIDLTensorPtr, kTVMFFIInt
_CPU = 1  # kDLCPU
_ANY = np.dtype([("type_index", "i4"), ("padding", "u4"), ("value", "i8")])
_TENSOR = np.dtype(
    [("data", "u8"), ("device_type", "i4"), ("device_id", "i4"), ("ndim", "i4"), ("code", "u1"),
     ("bits", "u1"), ("lanes", "u2"), ("shape", "u8"), ("strides", "u8"), ("byte_offset", "u8")]
)  # fmt: skip
_LAUNCH = np.dtype([("call", "u8"), ("args", "u8"), ("num_args", "i8")])
_PATCH = np.dtype([("target", "u8"), ("value_id", "i8")])

_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4  # DLDataTypeCode
_TYPES: Mapping[str, tuple[int, int, str]] = {  # code, bits, numpy's type for the same memory
    "f64": (_FLOAT, 64, "f8"), "f32": (_FLOAT, 32, "f4"), "f16": (_FLOAT, 16, "f2"),
    "bf16": (_BFLOAT, 16, "u2"), "fp8_e4m3": (_UINT, 8, "u1"), "fp8_e5m2": (_UINT, 8, "u1"),
    "ue8m0": (_UINT, 8, "u1"), "i64": (_INT, 64, "i8"), "i32": (_INT, 32, "i4"),
    "i8": (_INT, 8, "i1"), "u8": (_UINT, 8, "u1"),
}  # fmt: skip


class LaunchFailed(RuntimeError):
    """Launch `launch_id` of a step returned an error."""

    def __init__(self, launch_id: int, text: str) -> None:
        super().__init__(text)
        self.launch_id = launch_id


@dataclass(frozen=True)
class Slot:
    """A tensor of a prepared step: fixed memory, extents bound per step."""

    address: int
    dtype: str
    shape: tuple[Extent, ...]


@dataclass(frozen=True)
class Call:
    """A launch of a prepared step: kernel symbol, indices of its slots, ints."""

    symbol: str
    slots: tuple[int, ...]
    ints: tuple[Extent, ...]


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Return numpy's type for the memory of a dtype: bf16 is uint16, the 8-bit floats are uint8."""
    return np.dtype(_TYPES[dtype][2])


def default_num_threads() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def allocate(num_bytes: int) -> Bytes:
    """Return zeroed bytes at a page boundary; pages cost memory only once touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
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


def load_file(path: Path) -> Bytes:
    """Return a file's bytes in huge pages if it is small beside this machine's memory, else mapped.

    Weights are streamed once a token: with 4 KB pages address translation costs 5 to 10 % of it.
    """
    size = path.stat().st_size
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not hasattr(mmap, "MADV_HUGEPAGE") or not _HUGE_PAGE <= size <= memory // 4:
        return map_file(path)
    pages = mmap.mmap(-1, size + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages
        return map_file(path)
    whole = np.frombuffer(pages, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    found = whole[start : start + size]
    with path.open("rb") as file:
        if file.readinto(found.data) != size:
            raise ArtifactError(f"file '{path}': changed while it was read: want {size} bytes")
    found.flags.writeable = False
    return found


def check_target(target: TargetRecord) -> None:
    """Raise ArtifactError unless this machine can run kernels built for the target."""
    if ascend950_model.accepts(target):
        return
    if target.name != "cpu":
        raise ArtifactError(f"target '{target.name}' cannot run on this device: want cpu")
    machine = platform.machine()
    want = "aarch64" if target.variant.startswith("aarch64") else "x86_64"
    if machine != want:
        raise ArtifactError(
            f"variant '{target.variant}' is for another architecture: got {machine}, want {want}; "
            "compile the model again on this machine"
        )
    flags = cpu_flags()
    for feature in target.features:
        if feature not in flags:
            raise ArtifactError(
                f"CPU feature '{feature}' is missing on this machine: want variant "
                f"{target.variant}; compile the model again for this machine"
            )


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the features that the operating system lists for its first core."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError as error:
        raise ArtifactError(f"CPU features cannot be read: {error}") from None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


class CpuLibrary:
    """The kernels of an artifact, loaded. Stays loaded for the life of the process."""

    def __init__(self, path: Path, symbols: Sequence[str]) -> None:
        """Load the library; raise ArtifactError if it, a kernel or the host part is missing."""
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
            self.addresses = {s: self._address(f"__tvm_ffi_{s}") for s in symbols}
            self._bind()
        except (OSError, AttributeError) as error:
            raise ArtifactError(f"library '{path.name}': {error}") from None

    def _address(self, name: str) -> int:
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    def _bind(self) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.create = self._library.tw_pool_create
        self.create.argtypes, self.create.restype = [ctypes.c_int32], pointer
        self.destroy = self._library.tw_pool_destroy
        self.destroy.argtypes, self.destroy.restype = [pointer], None
        self.run = self._library.tw_run
        self.run.argtypes = [pointer, pointer, number, pointer, number, pointer, pointer, pointer,
                             number]  # fmt: skip
        self.run.restype = number

    @functools.cached_property
    def module(self) -> Any:
        """The same library as a TVM-FFI module: kernels by symbol, called one by one."""
        return tvm_ffi.load_module(str(self.path))


class CpuPool:
    """The threads of one engine. The caller of a run is the first of them."""

    def __init__(self, library: CpuLibrary, num_threads: int) -> None:
        handle = library.create(num_threads)
        if not handle:
            raise RuntimeError(f"thread pool: the system refused to start {num_threads} threads")
        self.handle: int = handle
        self._stop = weakref.finalize(self, library.destroy, handle)

    def close(self) -> None:
        """Stop the threads; the pool must not run again."""
        self._stop()


class CpuDevice:
    """A CPU with a number of threads, by default as many as this process has cores."""

    def __init__(self, num_threads: int | None = None) -> None:
        count = default_num_threads() if num_threads is None else num_threads
        if not 1 <= count <= MAX_THREADS:
            raise ValueError(f"num_threads: got {count}, want 1 to {MAX_THREADS}")
        self.num_threads = count

    def allocate(self, num_bytes: int) -> Bytes:
        """Return zeroed, 64-byte aligned bytes."""
        return allocate(num_bytes)

    def create_pool(self, library: CpuLibrary) -> CpuPool:
        """Start the threads of an engine."""
        return CpuPool(library, self.num_threads)


class LaunchTable:
    """Launches laid out in memory as C reads them. Not thread-safe: a run writes the extents."""

    def __init__(self, library: CpuLibrary, slots: Sequence[Slot], calls: Sequence[Call]) -> None:
        self._library = library
        self._extents: dict[str, tuple[int, Extent]] = {}
        self._patches: list[tuple[int, int]] = []
        self._tensors = self._lay_tensors(slots)
        self._launches = self._lay_launches(calls)
        self._patch_array = np.array(self._patches, _PATCH)
        self._values = np.zeros(max(len(self._extents), 1), np.int64)
        self._error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._bound: dict[str, int] | None = None
        self.num_launches = len(calls)
        self._fixed = (
            self._launches.ctypes.data, len(calls), self._patch_array.ctypes.data,
            len(self._patches), self._values.ctypes.data,
        )  # fmt: skip

    def _lay_tensors(self, slots: Sequence[Slot]) -> Array:
        tensors = np.zeros(len(slots), _TENSOR)
        self._shapes = np.zeros(max(sum(len(s.shape) for s in slots), 1), np.int64)
        base, at = self._shapes.ctypes.data, 0
        for index, slot in enumerate(slots):
            code, bits, _ = _TYPES[slot.dtype]
            tensors[index] = (slot.address, _CPU, 0, len(slot.shape), code, bits, 1,
                              base + 8 * at, 0, 0)  # fmt: skip
            for extent in slot.shape:
                self._shapes[at] = self._place(extent, base + 8 * at)
                at += 1
        return tensors

    def _lay_launches(self, calls: Sequence[Call]) -> Array:
        rows = sum(len(c.slots) + len(c.ints) for c in calls)
        self._args = np.zeros(max(rows, 1), _ANY)
        launches = np.zeros(len(calls), _LAUNCH)
        base, at = self._args.ctypes.data, 0
        for index, call in enumerate(calls):
            count = len(call.slots) + len(call.ints)
            launches[index] = (self._library.addresses[call.symbol], base + 16 * at, count)
            for slot_id in call.slots:
                address = self._tensors.ctypes.data + _TENSOR.itemsize * slot_id
                self._args[at] = (_TENSOR_INDEX, 0, address)
                at += 1
            for extent in call.ints:
                self._args[at] = (_INT_INDEX, 0, self._place(extent, base + 16 * at + 8))
                at += 1
        return launches

    def _place(self, extent: Extent, target: int) -> int:
        """Return a constant extent's value; note where any other must be written."""
        if isinstance(extent, int):
            return extent
        value_id, _ = self._extents.setdefault(repr(extent), (len(self._extents), extent))
        self._patches.append((target, value_id))
        return 0

    def run(self, pool: CpuPool, dims: Mapping[str, int], seconds: Array | None = None) -> None:
        """Run all launches with these dims; `seconds`, if given, receives the time of each.

        Raises LaunchFailed at the first launch that fails, RuntimeError in a forked process.
        """
        if dims != self._bound:
            self._bound = None
            for value_id, extent in self._extents.values():
                self._values[value_id] = evaluate(extent, dims)
            self._bound = dict(dims)
        times = None if seconds is None else seconds.ctypes.data
        failed = self._library.run(pool.handle, *self._fixed, times, self._error, _ERROR_BYTES)
        if failed == -1:
            return
        text = self._error.value.decode(errors="replace")
        if failed == -2:
            raise RuntimeError(f"thread pool: {text}; load the artifact again in this process")
        raise LaunchFailed(failed, text)
