"""Run the plan of an artifact: checks, buckets, one step at a time. Knows no device.

A step is checked against the manifest, gets the smallest bucket that holds it, and goes to the
device's session, which owns memory and launches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from tilewright.runtime.artifact import BucketRecord, LaunchRecord
from tilewright.runtime.artifact_files import LoadedArtifact
from tilewright.runtime.cache_layout import CacheLayout
from tilewright.runtime.choose import Chooser
from tilewright.runtime.devices.device import Device, Observer, Step
from tilewright.runtime.devices.launch_table import LaunchFailed
from tilewright.runtime.devices.memory import Array, numpy_type
from tilewright.runtime.devices.memory import as_torch as as_torch
from tilewright.runtime.errors import LaunchError
from tilewright.runtime.plan_memory import bound_shape, sort_buckets
from tilewright.runtime.snapshot import CacheMemory


@dataclass(frozen=True)
class LaunchTime:
    """Seconds of one launch."""

    launch: LaunchRecord
    seconds: float


class Executor:
    """Runs steps of one artifact on one device; calls of several threads run one by one."""

    def __init__(self, artifact: LoadedArtifact, device: Device, *, poison: bool = False) -> None:
        """`poison` fills arena and outputs with NaN before each run, so that stale reads show."""
        self.artifact = artifact
        self._manifest = artifact.manifest
        self._buckets = sort_buckets(artifact.manifest)
        self._dims = {d.name: d for d in artifact.manifest.dims}
        self._state_dims: dict[str, int] | None = None
        self._step: Step | None = None
        self._wanted: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._session = device.open(artifact, poison=poison)

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
            self._session.close()

    def allocate_states(self, dims: Mapping[str, int]) -> None:
        """Make zeroed states; earlier ones are dropped. `dims` hold for all runs that follow."""
        for name in dims:
            if name not in self._dims:
                raise ValueError(f"dim '{name}': unknown: have {', '.join(self._dims)}")
        with self._lock:
            self._session.allocate_states(dims)
            self._state_dims = dict(dims)
            self._step = None

    def state(self, name: str) -> Array:
        """Return a state's memory, live on the CPU and a copy elsewhere; bf16 as uint16."""
        names = [s.name for s in self._manifest.states]
        if self._state_dims is None or name not in names:
            raise ValueError(f"state '{name}': not allocated: states are {', '.join(names)}")
        return self._session.state(name, self._state_dims)

    def cache_memory(self, layout: CacheLayout) -> CacheMemory:
        """Return what copies between the states, which must be allocated, and snapshots."""
        return self._session.cache_memory(layout)

    def run(self, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> Mapping[str, Array]:
        """Run one step; return the outputs on the host, valid until the next run.

        Raises ValueError for inputs or dims that the plan cannot take, LaunchError if a kernel
        fails, RuntimeError if the process was forked after the executor was made.
        """
        with self._running(inputs, dims) as step:
            self._session.run(step)
            return self._session.host_outputs(step)

    def launch(self, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> Mapping[str, Any]:
        """Run one step like `run`, but leave the outputs where they lie, for the `chooser`."""
        with self._running(inputs, dims) as step:
            self._session.run(step)
            return self._session.outputs(step)

    def chooser(self) -> Chooser:
        """Return what chooses tokens from the outputs of `launch`."""
        return self._session.chooser()

    def time_launches(
        self, inputs: Mapping[str, Array], dims: Mapping[str, int]
    ) -> tuple[LaunchTime, ...]:
        """Run one step and return the time of each launch."""
        with self._running(inputs, dims) as step:
            seconds = self._session.time_launches(step)
        pairs = zip(step.bucket.launches, seconds, strict=True)
        return tuple(LaunchTime(launch, value) for launch, value in pairs)

    def observe(
        self, inputs: Mapping[str, Array], dims: Mapping[str, int], observer: Observer
    ) -> Mapping[str, Array]:
        """Run one step through TVM-FFI, on one thread, showing each launch to the observer."""
        with self._running(inputs, dims) as step:
            self._session.observe(step, observer)
            return self._session.host_outputs(step)

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

    @contextmanager
    def _running(
        self, inputs: Mapping[str, Array], dims: Mapping[str, int]
    ) -> Iterator[Step]:
        """Check and take the inputs under the lock; name the launch if one fails."""
        self._check_owner()
        with self._lock:
            step = self._step
            if step is None or step.given != dims:
                step = self._bind(dims)
            self._check_inputs(inputs)
            self._session.write_inputs(step, inputs)
            try:
                yield step
            except LaunchFailed as error:
                raise _failure(step.bucket, error.launch_id, str(error)) from None

    def _check_owner(self) -> None:
        # Before the lock, which a fork may have copied while held.
        if self._owner == 0:
            raise RuntimeError("executor: it is closed")
        if os.getpid() != self._owner:
            raise RuntimeError(
                "executor: the process was forked after it was made; "
                "load the artifact again in this process"
            )

    def _bind(self, dims: Mapping[str, int]) -> Step:
        if self._state_dims is None and self._manifest.states:
            raise ValueError("executor: allocate_states has not been called")
        for name, value in (self._state_dims or {}).items():
            if dims.get(name, value) != value:
                raise ValueError(f"dim '{name}': got {dims[name]}, but states have {value}")
        bound = {**(self._state_dims or {}), **dims}
        for dim in self._dims.values():
            got = bound.get(dim.name)
            if got is None or not dim.lower <= got <= dim.upper:
                raise ValueError(f"dim '{dim.name}': got {got}, want {dim.lower} to {dim.upper}")
        self._wanted = {
            t.name: (bound_shape(t, bound), numpy_type(t.dtype)) for t in self._manifest.inputs
        }
        self._step = Step(dict(dims), bound, self.bucket(dims))
        return self._step

    def _check_inputs(self, inputs: Mapping[str, Array]) -> None:
        for name, (shape, dtype) in self._wanted.items():
            array = inputs.get(name)
            if array is None:
                raise ValueError(f"input '{name}': missing: got {', '.join(inputs)}")
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"input '{name}': got {array.dtype}{list(array.shape)}, "
                    f"want {dtype}{list(shape)}"
                )
        if len(inputs) > len(self._wanted):
            extra = next(name for name in inputs if name not in self._wanted)
            raise ValueError(f"input '{extra}': unknown: have {', '.join(self._wanted)}")


def _failure(bucket: BucketRecord, launch_id: int, text: str) -> LaunchError:
    launch = bucket.launches[launch_id]
    return LaunchError(
        f"launch {launch_id} '{launch.group}' of bucket '{bucket.name}' failed: {text}"
    )
