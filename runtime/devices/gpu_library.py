"""The kernels of a GPU artifact, and a bucket's launches prepared to be called."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm_ffi

from tilewright.runtime.devices.ffi import KernelType, take_error
from tilewright.runtime.devices.launch_table import LaunchFailed, LaunchLayout
from tilewright.runtime.errors import ArtifactError


class GpuLibrary:
    """Kernels whose host functions launch machine code embedded beside them."""

    def __init__(self, path: Path, symbols: Sequence[str]) -> None:
        """Load the library; raise ArtifactError if it or a kernel is missing."""
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
            self.addresses = {s: self._address(f"__tvm_ffi_{s}") for s in symbols}
        except (OSError, AttributeError) as error:
            raise ArtifactError(f"library '{path.name}': {error}") from None

    def _address(self, name: str) -> int:
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    @functools.cached_property
    def module(self) -> Any:
        """The same library as a TVM-FFI module: kernels by symbol, called one by one."""
        return tvm_ffi.load_module(str(self.path))


class GpuTable:
    """A bucket's launches. Not thread-safe: a launch writes the extents."""

    def __init__(self, layout: LaunchLayout) -> None:
        self._layout = layout
        self._result = ctypes.create_string_buffer(16)  # TVMFFIAny; kernels return nothing
        self._calls = [
            (KernelType(int(row["call"])), int(row["args"]), int(row["num_args"]))
            for row in layout.launches
        ]

    def launch(self, dims: Mapping[str, int]) -> None:
        """Launch all with these dims. Raises LaunchFailed for the first that is refused."""
        self._bind(dims)
        result = ctypes.addressof(self._result)
        for launch_id, (kernel, args, num_args) in enumerate(self._calls):
            if kernel(None, args, num_args, result):
                raise LaunchFailed(launch_id, take_error())

    def singly(self, dims: Mapping[str, int]) -> list[Callable[[], None]]:
        """Return every launch on its own, with these dims."""
        self._bind(dims)
        return [functools.partial(self._launch_one, i) for i in range(len(self._calls))]

    def _bind(self, dims: Mapping[str, int]) -> None:
        if self._layout.bind(dims):
            self._layout.write()

    def _launch_one(self, launch_id: int) -> None:
        kernel, args, num_args = self._calls[launch_id]
        if kernel(None, args, num_args, ctypes.addressof(self._result)):
            raise LaunchFailed(launch_id, take_error())
