"""Launches laid out in memory as TVM-FFI reads them: tensors, arguments and calls.

The structures mirror the C headers of TVM-FFI. Everything but the extents is fixed, so that a
step binds its dims, writes the extents and calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilewright.runtime.artifact import Extent, evaluate
from tilewright.runtime.devices.memory import TYPES, Array

_TENSOR_INDEX, _INT_INDEX = 7, 1  # kTVMFFIDLTensorPtr, kTVMFFIInt
CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA
_ANY = np.dtype([("type_index", "i4"), ("padding", "u4"), ("value", "i8")])
_TENSOR = np.dtype(
    [("data", "u8"), ("device_type", "i4"), ("device_id", "i4"), ("ndim", "i4"), ("code", "u1"),
     ("bits", "u1"), ("lanes", "u2"), ("shape", "u8"), ("strides", "u8"), ("byte_offset", "u8")]
)  # fmt: skip
LAUNCH = np.dtype([("call", "u8"), ("args", "u8"), ("num_args", "i8")])
PATCH = np.dtype([("target", "u8"), ("value_id", "i8")])


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


class Place(NamedTuple):
    """Where memory lies, as DLPack says it: the kind of device and which of them."""

    device_type: int = CPU
    device_id: int = 0


class LaunchLayout:
    """Tables of a step's launches. `launches` and `patches` are addresses of LAUNCH and PATCH."""

    def __init__(
        self,
        addresses: Mapping[str, int],
        slots: Sequence[Slot],
        calls: Sequence[Call],
        place: Place = Place(),
    ) -> None:
        self._addresses = addresses
        self._place = place
        self._extents: dict[str, tuple[int, Extent]] = {}
        self._patches: list[tuple[int, int]] = []
        self._tensors = self._lay_tensors(slots)
        self.launches = self._lay_launches(calls)
        self.patches = np.array(self._patches, PATCH)
        self.values = np.zeros(max(len(self._extents), 1), np.int64)
        self._bound: dict[str, int] | None = None
        self._scatter: tuple[Array, Array, Array, Array] | None = None

    def _lay_tensors(self, slots: Sequence[Slot]) -> Array:
        tensors = np.zeros(len(slots), _TENSOR)
        self._shapes = np.zeros(max(sum(len(s.shape) for s in slots), 1), np.int64)
        base, at = self._shapes.ctypes.data, 0
        for index, slot in enumerate(slots):
            kind = TYPES[slot.dtype]
            tensors[index] = (slot.address, *self._place, len(slot.shape), kind.code, kind.bits, 1,
                              base + 8 * at, 0, 0)  # fmt: skip
            for extent in slot.shape:
                self._shapes[at] = self._keep(extent, base + 8 * at)
                at += 1
        return tensors

    def _lay_launches(self, calls: Sequence[Call]) -> Array:
        rows = sum(len(c.slots) + len(c.ints) for c in calls)
        self._args = np.zeros(max(rows, 1), _ANY)
        launches = np.zeros(len(calls), LAUNCH)
        base, at = self._args.ctypes.data, 0
        for index, call in enumerate(calls):
            count = len(call.slots) + len(call.ints)
            launches[index] = (self._addresses[call.symbol], base + 16 * at, count)
            for slot_id in call.slots:
                address = self._tensors.ctypes.data + _TENSOR.itemsize * slot_id
                self._args[at] = (_TENSOR_INDEX, 0, address)
                at += 1
            for extent in call.ints:
                self._args[at] = (_INT_INDEX, 0, self._keep(extent, base + 16 * at + 8))
                at += 1
        return launches

    def _keep(self, extent: Extent, target: int) -> int:
        """Return a constant extent's value; note where any other must be written."""
        if isinstance(extent, int):
            return extent
        value_id, _ = self._extents.setdefault(repr(extent), (len(self._extents), extent))
        self._patches.append((target, value_id))
        return 0

    def bind(self, dims: Mapping[str, int]) -> bool:
        """Compute `values` for these dims; return whether they may differ from the last."""
        if dims == self._bound:
            return False
        self._bound = None
        for value_id, extent in self._extents.values():
            self.values[value_id] = evaluate(extent, dims)
        self._bound = dict(dims)
        return True

    def write(self) -> None:
        """Write the values to where tensors and arguments need them."""
        if self._scatter is None:
            self._scatter = self._plan_scatter()
        shapes, shape_values, args, arg_values = self._scatter
        self._shapes[shapes] = self.values[shape_values]
        self._args["value"][args] = self.values[arg_values]

    def _plan_scatter(self) -> tuple[Array, Array, Array, Array]:
        """Turn the patches' addresses into indices of the two arrays they lie in."""
        targets = self.patches["target"].astype(np.int64)
        value_ids = self.patches["value_id"]
        base, args = self._shapes.ctypes.data, self._args.ctypes.data
        is_shape = (targets >= base) & (targets < base + self._shapes.nbytes)
        at = (targets[~is_shape] - args) // _ANY.itemsize
        return (targets[is_shape] - base) // 8, value_ids[is_shape], at, value_ids[~is_shape]
