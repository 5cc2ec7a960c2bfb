"""Run the plan of an artifact: memory, buckets, launches.

A step copies its inputs into fixed buffers, binds its dims and makes one foreign call. Memory is
the mapped weights, the states, one arena shared by all buckets, and inputs and outputs; pages that
are never touched cost nothing.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from tilewright.runtime.artifact import (
    Argument,
    BucketRecord,
    LaunchRecord,
    TensorRecord,
    evaluate,
    weight_tensor,
)
from tilewright.runtime.artifact_files import LoadedArtifact
from tilewright.runtime.devices.cpu import (
    Array,
    Bytes,
    Call,
    CpuDevice,
    LaunchFailed,
    LaunchTable,
    Slot,
    numpy_type,
)
from tilewright.runtime.plan_check import bucket_limits, tensor_bytes

_TORCH_TYPES = {"bf16": torch.bfloat16}
_POISON = 0xFF  # NaN as f64, f32, f16 or bf16; -1 as an int


class Observer(Protocol):
    """Sees every launch of a step: arguments in kernel order, then ints, before and after the call.

    Arrays are the live memory: bf16 as uint16. An observer must not write them.
    """

    def before(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        """Called with outputs not yet written."""

    def after(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        """Called with outputs written."""


@dataclass(frozen=True)
class LaunchTime:
    """Wall-clock seconds of one launch."""

    launch: LaunchRecord
    seconds: float


@dataclass(frozen=True, eq=False)
class _Views:
    """Inputs and outputs cut to the shapes of a step. `dims` are `given` and those of states."""

    given: Mapping[str, int]
    dims: Mapping[str, int]
    bucket: BucketRecord
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


class Executor:
    """Runs steps of one artifact on one device; calls of several threads run one by one."""

    def __init__(
        self, artifact: LoadedArtifact, device: CpuDevice, *, poison: bool = False
    ) -> None:
        """`poison` fills arena and outputs with NaN before each run, so that stale reads show."""
        self.artifact = artifact
        self._device = device
        self._poison = poison
        self._manifest = artifact.manifest
        self._records = _index_records(artifact)
        self._buckets = _sort_buckets(artifact)
        self._state_dims: dict[str, int] | None = None
        self._tables: dict[str, LaunchTable] = {}
        self._views: _Views | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._arena = device.allocate(max(b.arena_bytes for b in self._buckets))
        self._memory = self._allocate_fixed()
        self._pool = device.create_pool(artifact.library)

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads. Runs after this are errors."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._owner = 0
            self._pool.close()

    def allocate_states(self, dims: Mapping[str, int]) -> None:
        """Make zeroed states; earlier ones are dropped. `dims` hold for all runs that follow."""
        known = [d.name for d in self._manifest.dims]
        for name in dims:
            if name not in known:
                raise ValueError(f"dim '{name}': unknown: have {', '.join(known)}")
        with self._lock:
            for state in self._manifest.states:
                memory = self._device.allocate(tensor_bytes(state, dims))
                self._memory["state", state.name] = memory
            self._state_dims = dict(dims)
            self._tables.clear()
            self._views = None

    def state(self, name: str) -> Array:
        """Return a state's live memory; bf16 as uint16."""
        if self._state_dims is None or ("state", name) not in self._records:
            known = ", ".join(s.name for s in self._manifest.states)
            raise ValueError(f"state '{name}': not allocated: states are {known}")
        return self._view("state", self._records["state", name], self._state_dims)

    def run(self, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> Mapping[str, Array]:
        """Run one step; return views of the outputs, valid until the next run.

        Raises ValueError for inputs or dims that the plan cannot take, RuntimeError if a kernel
        fails or the process was forked after the executor was made.
        """
        return self._run(inputs, dims, None)

    def time_launches(
        self, inputs: Mapping[str, Array], dims: Mapping[str, int]
    ) -> tuple[LaunchTime, ...]:
        """Run one step and return the time of each launch."""
        launches = self.bucket(dims).launches
        seconds = np.zeros(len(launches))
        self._run(inputs, dims, seconds)
        pairs = zip(launches, seconds.tolist(), strict=True)
        return tuple(LaunchTime(launch, value) for launch, value in pairs)

    def observe(
        self, inputs: Mapping[str, Array], dims: Mapping[str, int], observer: Observer
    ) -> Mapping[str, Array]:
        """Run one step through TVM-FFI, on one thread, showing each launch to the observer."""
        self._check_owner()
        with self._lock:
            views = self._prepare(inputs, dims)
            for launch_id, launch in enumerate(views.bucket.launches):
                tensors = [self._argument(a, views) for a in launch.arguments]
                ints = [evaluate(extent, views.dims) for extent in launch.ints]
                arrays = [array for array, _ in tensors]
                observer.before(launch, arrays, ints)
                try:
                    kernel = self.artifact.library.module[launch.kernel]
                    kernel(*(as_torch(array, dtype) for array, dtype in tensors), *ints)
                except ValueError as error:
                    raise _failure(views.bucket, launch_id, str(error)) from None
                observer.after(launch, arrays, ints)
            return views.outputs

    def bucket(self, dims: Mapping[str, int]) -> BucketRecord:
        """Return the smallest bucket that holds these dims; raise ValueError if none does."""
        bound = {**(self._state_dims or {}), **dims}
        for bucket in self._buckets:
            if all(bound.get(name, 0) <= most for name, most in bucket.bounds.items()):
                return bucket
        raise ValueError(
            f"dims {dict(dims)}: no bucket is large enough: have "
            + ", ".join(b.name for b in self._buckets)
        )

    def _run(
        self, inputs: Mapping[str, Array], dims: Mapping[str, int], seconds: Array | None
    ) -> Mapping[str, Array]:
        self._check_owner()
        with self._lock:
            views = self._prepare(inputs, dims)
            table = self._tables.get(views.bucket.name)
            if table is None:
                table = self._build_table(views.bucket)
                self._tables[views.bucket.name] = table
            try:
                table.run(self._pool, views.dims, seconds)
            except LaunchFailed as error:
                raise _failure(views.bucket, error.launch_id, str(error)) from None
            return views.outputs

    def _check_owner(self) -> None:
        # Before the lock, which a fork may have copied while held.
        if self._owner == 0:
            raise RuntimeError("executor: it is closed")
        if os.getpid() != self._owner:
            raise RuntimeError(
                "executor: the process was forked after it was made; "
                "load the artifact again in this process"
            )

    def _prepare(self, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> _Views:
        views = self._views
        if views is None or views.given != dims:
            views = self._views = self._cut_views(dims)
        for name, view in views.inputs.items():
            array = inputs.get(name)
            if array is None:
                raise ValueError(f"input '{name}': missing: got {', '.join(inputs)}")
            if array.shape != view.shape or array.dtype != view.dtype:
                raise ValueError(
                    f"input '{name}': got {array.dtype}{list(array.shape)}, "
                    f"want {view.dtype}{list(view.shape)}"
                )
            view[...] = array
        if len(inputs) > len(views.inputs):
            extra = next(name for name in inputs if name not in views.inputs)
            raise ValueError(f"input '{extra}': unknown: have {', '.join(views.inputs)}")
        if self._poison:
            self._fill_poison(views)
        return views

    def _cut_views(self, dims: Mapping[str, int]) -> _Views:
        if self._state_dims is None and self._manifest.states:
            raise ValueError("executor: allocate_states has not been called")
        for name, value in (self._state_dims or {}).items():
            if dims.get(name, value) != value:
                raise ValueError(f"dim '{name}': got {dims[name]}, but states have {value}")
        bound = {**(self._state_dims or {}), **dims}
        for dim in self._manifest.dims:
            got = bound.get(dim.name)
            if got is None or not dim.lower <= got <= dim.upper:
                raise ValueError(f"dim '{dim.name}': got {got}, want {dim.lower} to {dim.upper}")
        inputs = {t.name: self._view("input", t, bound) for t in self._manifest.inputs}
        outputs = {t.name: self._view("output", t, bound) for t in self._manifest.outputs}
        return _Views(dict(dims), bound, self.bucket(dims), inputs, outputs)

    def _view(self, kind: str, record: TensorRecord, dims: Mapping[str, int]) -> Array:
        memory = self._memory[kind, record.name][: tensor_bytes(record, dims)]
        shape = tuple(evaluate(extent, dims) for extent in record.shape)
        return memory.view(numpy_type(record.dtype)).reshape(shape)

    def _fill_poison(self, views: _Views) -> None:
        self._arena[...] = _POISON
        for output in views.outputs.values():
            output.view(np.uint8)[...] = _POISON

    def _allocate_fixed(self) -> dict[tuple[str, str], Bytes]:
        """Inputs, outputs and scratch, each large enough for every bucket."""
        memory: dict[tuple[str, str], Bytes] = {}
        limits = [bucket_limits(self._manifest, b) for b in self._buckets]
        for kind, records in (("input", self._manifest.inputs), ("output", self._manifest.outputs)):
            for record in records:
                size = max(tensor_bytes(record, limit) for limit in limits)
                memory[kind, record.name] = self._device.allocate(size)
        per_thread = max(b.scratch_bytes_per_thread for b in self._buckets)
        memory["scratch", ""] = self._device.allocate(per_thread * self._device.num_threads)
        return memory

    def _record(self, argument: Argument, bucket: BucketRecord) -> tuple[Bytes, TensorRecord]:
        """Return an argument's memory and its type."""
        key = (argument.kind, argument.name)
        match argument.kind:
            case "weight":
                array = self.artifact.weights[argument.name]
                return array.reshape(-1).view(np.uint8), self._records[key]
            case "scratch":
                size = bucket.scratch_bytes_per_thread * self._device.num_threads
                return self._memory["scratch", ""], TensorRecord("scratch", "u8", (size,))
            case "buffer":
                place = next(p for p in bucket.placements if p.name == argument.name)
                end = place.offset + place.num_bytes
                return self._arena[place.offset : end], self._records[key]
            case _:
                return self._memory[key], self._records[key]

    def _argument(self, argument: Argument, views: _Views) -> tuple[Array, str]:
        memory, record = self._record(argument, views.bucket)
        shape = tuple(evaluate(extent, views.dims) for extent in record.shape)
        part = memory[: tensor_bytes(record, views.dims)]
        return part.view(numpy_type(record.dtype)).reshape(shape), record.dtype

    def _build_table(self, bucket: BucketRecord) -> LaunchTable:
        slots: list[Slot] = []
        slot_ids: dict[Argument, int] = {}
        calls: list[Call] = []
        for launch in bucket.launches:
            for argument in launch.arguments:
                if argument not in slot_ids:
                    memory, record = self._record(argument, bucket)
                    slot_ids[argument] = len(slots)
                    slots.append(Slot(memory.ctypes.data, record.dtype, record.shape))
            ids = tuple(slot_ids[a] for a in launch.arguments)
            calls.append(Call(launch.kernel, ids, launch.ints))
        return LaunchTable(self.artifact.library, slots, calls)


def _sort_buckets(artifact: LoadedArtifact) -> tuple[BucketRecord, ...]:
    """Smallest first: by the product of the limits, then by the limits in the order of the dims."""

    def size(bucket: BucketRecord) -> tuple[float, tuple[int, ...]]:
        limits = tuple(bucket_limits(artifact.manifest, bucket).values())
        return float(np.prod([float(v) for v in limits])), limits

    return tuple(sorted(artifact.manifest.buckets, key=size))


def _index_records(artifact: LoadedArtifact) -> dict[tuple[str, str], TensorRecord]:
    """Every tensor that a launch may name, by kind and name."""
    manifest = artifact.manifest
    records = {("weight", w.name): weight_tensor(w) for w in manifest.weights}
    for kind, table in (
        ("input", manifest.inputs),
        ("output", manifest.outputs),
        ("state", manifest.states),
        ("buffer", manifest.buffers),
    ):
        records.update({(kind, t.name): t for t in table})
    return records


def as_torch(array: Array, dtype: str) -> torch.Tensor:
    """Return a tensor over the same memory; bf16 memory, uint16 in numpy, becomes bfloat16."""
    with warnings.catch_warnings():  # weights are read-only, which torch has no way to express
        warnings.filterwarnings("ignore", message=".*not writable.*")
        tensor = torch.from_numpy(array)
    return tensor.view(_TORCH_TYPES[dtype]) if dtype in _TORCH_TYPES else tensor


def _failure(bucket: BucketRecord, launch_id: int, text: str) -> RuntimeError:
    launch = bucket.launches[launch_id]
    return RuntimeError(
        f"launch {launch_id} '{launch.group}' of bucket '{bucket.name}' failed: {text}"
    )
