"""Where the tensors of a plan lie: regions of memory, their sizes, arguments of launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from tilewright.runtime.artifact import (
    Argument,
    BucketRecord,
    Manifest,
    TensorRecord,
    evaluate,
    weight_tensor,
)
from tilewright.runtime.devices.launch_table import Call, Slot
from tilewright.runtime.plan_check import bucket_limits, tensor_bytes

Region: TypeAlias = tuple[str, str]  # kind and name; the arena and the scratch have no name
ARENA: Region = ("arena", "")
SCRATCH: Region = ("scratch", "")


class Located(NamedTuple):
    """A tensor argument: its region, the byte it starts at there, and its type."""

    region: Region
    offset: int
    record: TensorRecord


class PlanMemory:
    """The regions a plan needs. `num_scratches`: threads that run a kernel's parts at once."""

    def __init__(self, manifest: Manifest, num_scratches: int) -> None:
        self.manifest = manifest
        self.buckets = sort_buckets(manifest)
        self.records = _index_records(manifest)
        self._num_scratches = num_scratches
        self._offsets = {
            b.name: {p.name: p.offset for p in b.placements} for b in manifest.buckets
        }

    def fixed_bytes(self) -> dict[Region, int]:
        """Bytes of the arena, of scratch, and of inputs and outputs, enough for every bucket."""
        limits = [bucket_limits(self.manifest, b) for b in self.buckets]
        sizes: dict[Region, int] = {
            ARENA: max(b.arena_bytes for b in self.buckets),
            SCRATCH: max(b.scratch_bytes_per_thread for b in self.buckets) * self._num_scratches,
        }
        for kind, records in (("input", self.manifest.inputs), ("output", self.manifest.outputs)):
            for record in records:
                sizes[kind, record.name] = max(tensor_bytes(record, most) for most in limits)
        return sizes

    def state_bytes(self, dims: Mapping[str, int]) -> dict[Region, int]:
        """Bytes of every state with its dims bound."""
        return {("state", s.name): tensor_bytes(s, dims) for s in self.manifest.states}

    def locate(self, argument: Argument, bucket: BucketRecord) -> Located:
        """Return where an argument of a bucket's launches lies."""
        key = (argument.kind, argument.name)
        match argument.kind:
            case "scratch":
                size = bucket.scratch_bytes_per_thread * self._num_scratches
                return Located(SCRATCH, 0, TensorRecord("scratch", "u8", (size,)))
            case "buffer":
                offset = self._offsets[bucket.name][argument.name]
                return Located(ARENA, offset, self.records[key])
            case _:
                return Located(key, 0, self.records[key])


def lay_out(
    memory: PlanMemory, bucket: BucketRecord, address_of: Callable[[Region], int]
) -> tuple[list[Slot], list[Call]]:
    """Return the tensors and the calls of a bucket's launches."""
    slots: list[Slot] = []
    slot_ids: dict[Argument, int] = {}
    calls: list[Call] = []
    for launch in bucket.launches:
        for argument in launch.arguments:
            if argument not in slot_ids:
                found = memory.locate(argument, bucket)
                slot_ids[argument] = len(slots)
                address = address_of(found.region) + found.offset
                slots.append(Slot(address, found.record.dtype, found.record.shape))
        ids = tuple(slot_ids[a] for a in launch.arguments)
        calls.append(Call(launch.kernel, ids, launch.ints))
    return slots, calls


def sort_buckets(manifest: Manifest) -> tuple[BucketRecord, ...]:
    """Smallest first: by the product of the limits, then by the limits in the order of the dims."""

    def size(bucket: BucketRecord) -> tuple[float, tuple[int, ...]]:
        limits = tuple(bucket_limits(manifest, bucket).values())
        return float(np.prod([float(v) for v in limits])), limits

    return tuple(sorted(manifest.buckets, key=size))


def bound_shape(record: TensorRecord, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Return a tensor's shape with its dims bound."""
    return tuple(evaluate(extent, dims) for extent in record.shape)


def _index_records(manifest: Manifest) -> dict[Region, TensorRecord]:
    """Every tensor that a launch may name, by kind and name."""
    records: dict[Region, TensorRecord] = {
        ("weight", w.name): weight_tensor(w) for w in manifest.weights
    }
    for kind, table in (
        ("input", manifest.inputs),
        ("output", manifest.outputs),
        ("state", manifest.states),
        ("buffer", manifest.buffers),
    ):
        records.update({(kind, t.name): t for t in table})
    return records
