"""The CPU as a device: memory, the kernels' library, its thread pool, prepared launches.

A prepared step is tables that the library's own loop reads, so that running it is one foreign
call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm_ffi

from tilewright.runtime.artifact import Argument, Manifest, TargetRecord, evaluate
from tilewright.runtime.cache_memory import StateMemory
from tilewright.runtime.choose import Chooser, HostChooser
from tilewright.runtime.devices import ascend950_model
from tilewright.runtime.devices.device import Observer, Step
from tilewright.runtime.devices.launch_table import Call, LaunchFailed, LaunchLayout, Slot
from tilewright.runtime.devices.memory import (
    POISON,
    Array,
    Bytes,
    allocate,
    as_torch,
    load_file,
    map_file,
    numpy_type,
    release_unused_memory,
)
from tilewright.runtime.errors import ArtifactError, RequestError
from tilewright.runtime.params import shown
from tilewright.runtime.plan_check import tensor_bytes
from tilewright.runtime.plan_memory import ARENA, PlanMemory, Region, bound_shape, lay_out

if TYPE_CHECKING:
    from tilewright.runtime.artifact_files import LoadedArtifact
    from tilewright.runtime.cache_layout import CacheLayout

__all__ = [
    "Array", "Bytes", "Call", "CpuDevice", "CpuLibrary", "CpuPool", "LaunchFailed", "LaunchTable",
    "Slot", "allocate", "as_torch", "check_target", "cpu_flags", "default_num_threads", "load_file",
    "map_file", "numpy_type", "release_unused_memory",
]  # fmt: skip

MAX_THREADS = 1024
_ERROR_BYTES = 1024


def default_num_threads() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
        if type(count) is not int or not 1 <= count <= MAX_THREADS:
            raise RequestError(
                f"engine 'num_threads': got {shown(count)}, want an int in 1..{MAX_THREADS}"
            )
        self.num_threads = count

    def check(self, manifest: Manifest) -> None:
        """Raise ArtifactError unless this machine can run kernels built for the target."""
        check_target(manifest.target)

    def cache_blocks(self, manifest: Manifest, wanted: int, *, is_exact: bool) -> int:
        """Return what is wanted: pages cost memory only once touched."""
        return wanted

    def load_library(self, path: Path, symbols: Sequence[str]) -> CpuLibrary:
        """Load an artifact's kernels; raise ArtifactError if one is missing."""
        return CpuLibrary(path, symbols)

    def load_weights(self, path: Path) -> Bytes:
        """Return the weights in huge pages where that pays."""
        return load_file(path)

    def create_pool(self, library: CpuLibrary) -> CpuPool:
        """Start the threads of an engine."""
        return CpuPool(library, self.num_threads)

    def open(self, artifact: LoadedArtifact, *, poison: bool = False) -> CpuSession:
        """Make the memory of one executor and start its threads."""
        return CpuSession(artifact, self, poison=poison)


class LaunchTable:
    """Launches laid out in memory as C reads them. Not thread-safe: a run writes the extents."""

    def __init__(self, library: CpuLibrary, slots: Sequence[Slot], calls: Sequence[Call]) -> None:
        layout = LaunchLayout(library.addresses, slots, calls)
        self._library = library
        self._layout = layout
        self._error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.num_launches = len(layout.launches)
        self._fixed = (
            layout.launches.ctypes.data, len(layout.launches), layout.patches.ctypes.data,
            len(layout.patches), layout.values.ctypes.data,
        )  # fmt: skip

    def run(self, pool: CpuPool, dims: Mapping[str, int], seconds: Array | None = None) -> None:
        """Run all launches with these dims; `seconds`, if given, receives the time of each.

        Raises LaunchFailed at the first launch that fails, RuntimeError in a forked process.
        """
        self._layout.bind(dims)
        times = None if seconds is None else seconds.ctypes.data
        failed = self._library.run(pool.handle, *self._fixed, times, self._error, _ERROR_BYTES)
        if failed == -1:
            return
        text = self._error.value.decode(errors="replace")
        if failed == -2:
            raise RuntimeError(f"thread pool: {text}; load the artifact again in this process")
        raise LaunchFailed(failed, text)


class CpuSession:
    """An executor's memory and threads: a step copies its inputs and makes one foreign call.

    Memory is the mapped weights, the states, one arena shared by all buckets, and inputs and
    outputs; pages that are never touched cost nothing.
    """

    def __init__(self, artifact: LoadedArtifact, device: CpuDevice, *, poison: bool) -> None:
        assert isinstance(artifact.library, CpuLibrary), artifact.library
        self._library = artifact.library
        self._poison = poison
        self._plan = PlanMemory(artifact.manifest, device.num_threads)
        self._memory: dict[Region, Bytes] = {
            ("weight", name): array.reshape(-1).view(np.uint8)
            for name, array in artifact.weights.items()
        }
        for region, size in self._plan.fixed_bytes().items():
            self._memory[region] = allocate(size)
        self._tables: dict[str, LaunchTable] = {}
        self._viewed: Step | None = None
        self._state_dims: dict[str, int] = {}
        self._pool = device.create_pool(self._library)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.close()

    def allocate_states(self, dims: Mapping[str, int]) -> None:
        """Make zeroed states of these dims; earlier ones are dropped."""
        for region, size in self._plan.state_bytes(dims).items():
            self._memory[region] = allocate(size)
        self._tables.clear()
        self._viewed = None
        self._state_dims = dict(dims)

    def state(self, name: str, dims: Mapping[str, int]) -> Array:
        """Return a state's live memory."""
        return self._view("state", name, dims)

    def cache_memory(self, layout: CacheLayout) -> StateMemory:
        """Return what copies between the states and snapshots."""
        dims = self._state_dims
        return StateMemory(lambda name: self.state(name, dims), layout)

    def write_inputs(self, step: Step, inputs: Mapping[str, Array]) -> None:
        """Copy arrays that have the types and shapes the step wants."""
        if step is not self._viewed:
            manifest = self._plan.manifest
            self._inputs = {t.name: self._view("input", t.name, step.dims) for t in manifest.inputs}
            self._outputs = {
                t.name: self._view("output", t.name, step.dims) for t in manifest.outputs
            }
            self._viewed = step
        for name, view in self._inputs.items():
            view[...] = inputs[name]
        if self._poison:
            self._memory[ARENA][...] = POISON
            for output in self._outputs.values():
                output.view(np.uint8)[...] = POISON

    def run(self, step: Step) -> None:
        """Run the step's kernels. Raises LaunchFailed for the first that fails."""
        self._table(step).run(self._pool, step.dims)

    def time_launches(self, step: Step) -> Sequence[float]:
        """Run the step's kernels; return the seconds of each."""
        table = self._table(step)
        seconds = np.zeros(table.num_launches)
        table.run(self._pool, step.dims, seconds)
        return [float(s) for s in seconds]

    def observe(self, step: Step, observer: Observer) -> None:
        """Run the step's kernels one by one on this thread, showing each."""
        for launch_id, launch in enumerate(step.bucket.launches):
            tensors = [self._argument(a, step) for a in launch.arguments]
            ints = [evaluate(extent, step.dims) for extent in launch.ints]
            arrays = [array for array, _ in tensors]
            observer.before(launch, arrays, ints)
            try:
                kernel = self._library.module[launch.kernel]
                kernel(*(as_torch(array, dtype) for array, dtype in tensors), *ints)
            except ValueError as error:
                raise LaunchFailed(launch_id, str(error)) from None
            observer.after(launch, arrays, ints)

    def outputs(self, step: Step) -> Mapping[str, Array]:
        """Return views of the outputs, valid until the next step."""
        return self._outputs

    def host_outputs(self, step: Step) -> Mapping[str, Array]:
        """Return views of the outputs, valid until the next step."""
        return self._outputs

    def chooser(self) -> Chooser:
        """Return the sampler that works row by row."""
        return HostChooser()

    def _table(self, step: Step) -> LaunchTable:
        table = self._tables.get(step.bucket.name)
        if table is None:
            slots, calls = lay_out(self._plan, step.bucket, self._address)
            table = self._tables[step.bucket.name] = LaunchTable(self._library, slots, calls)
        return table

    def _address(self, region: Region) -> int:
        return self._memory[region].ctypes.data

    def _view(self, kind: str, name: str, dims: Mapping[str, int]) -> Array:
        record = self._plan.records[kind, name]
        memory = self._memory[kind, name][: tensor_bytes(record, dims)]
        return memory.view(numpy_type(record.dtype)).reshape(bound_shape(record, dims))

    def _argument(self, argument: Argument, step: Step) -> tuple[Array, str]:
        region, offset, record = self._plan.locate(argument, step.bucket)
        part = self._memory[region][offset : offset + tensor_bytes(record, step.dims)]
        view = part.view(numpy_type(record.dtype)).reshape(bound_shape(record, step.dims))
        return view, record.dtype
