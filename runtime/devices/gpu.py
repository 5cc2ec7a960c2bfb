"""An executor's memory and launches on a GPU.

All memory is taken at once: weights, inputs, outputs, arena and scratch in one piece, states in
another. A step is written to staging memory, copied in one piece, and launched: small buckets
padded to their limits, as a graph of several streams, the others launch by launch with exact
extents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tilewright.runtime.artifact import Argument, BucketRecord, evaluate
from tilewright.runtime.cache_layout import CacheLayout
from tilewright.runtime.choose import Chooser
from tilewright.runtime.choose_torch import TorchChooser
from tilewright.runtime.devices.chip import Chip, Replay
from tilewright.runtime.devices.device import Observer, Step
from tilewright.runtime.devices.gpu_library import GpuLibrary, GpuTable
from tilewright.runtime.devices.gpu_states import GpuStateMemory
from tilewright.runtime.devices.launch_table import LaunchLayout
from tilewright.runtime.devices.memory import POISON, TYPES, Array, as_torch
from tilewright.runtime.devices.padding import fill, padded_dims, paddings
from tilewright.runtime.lanes import LANES, Turn, turns_of
from tilewright.runtime.plan_check import tensor_bytes
from tilewright.runtime.plan_memory import ARENA, SCRATCH, PlanMemory, Region, bound_shape, lay_out

if TYPE_CHECKING:
    from tilewright.runtime.artifact_files import LoadedArtifact

GRAPH_TOKENS = 512  # larger steps outlast their launches, and padding them costs more than it saves
_ALIGNMENT = 256
# Scratch of launches on each stream of a graph but the first.
SIDES: tuple[Region, ...] = tuple(("scratch", f"lane {i}") for i in range(1, LANES))
GraphKey = tuple[str, tuple[tuple[str, int], ...]]


def aligned(num_bytes: int) -> int:
    """Round up to what starts of regions are aligned to."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def order_regions(plan: PlanMemory) -> dict[Region, int]:
    """Bytes of every fixed region but the weights, in the order they lie in memory.

    Inputs come first and the largest of them last, so that a step copies one short piece.
    """
    sizes = plan.fixed_bytes()
    inputs = sorted((r for r in sizes if r[0] == "input"), key=lambda r: sizes[r])
    outputs = [r for r in sizes if r[0] == "output"]
    found = {region: sizes[region] for region in (*inputs, *outputs, ARENA, SCRATCH)}
    captured = [
        b.scratch_bytes_per_thread for b in plan.buckets
        if b.bounds.get("tokens", GRAPH_TOKENS) <= GRAPH_TOKENS
    ]  # fmt: skip
    return {**found, **dict.fromkeys(SIDES, max(captured, default=0))}


def fixed_bytes(plan: PlanMemory) -> int:
    """Bytes of the one piece of memory that holds all but the states."""
    return aligned(plan.manifest.weights_bytes) + sum(
        aligned(size) for size in order_regions(plan).values()
    )


class GpuSession:
    """Memory and launches of one executor on one GPU."""

    def __init__(
        self, artifact: LoadedArtifact, chip: Chip, *, poison: bool, graphs: bool
    ) -> None:
        assert isinstance(artifact.library, GpuLibrary), artifact.library
        self._library = artifact.library
        self._weights = artifact.weights
        self._chip = chip
        self._poison = poison
        self._has_graphs = graphs
        self._plan = PlanMemory(artifact.manifest, 1)
        self._padding = paddings(artifact.manifest)
        self._memory: dict[Region, torch.Tensor] = {}
        self._state_dims: dict[str, int] = {}
        self._tables: dict[tuple[str, int], GpuTable] = {}
        self._turns: dict[str, list[Turn]] = {}
        self._graphs: dict[GraphKey, Replay | None] = {}
        self._ready: Step | None = None
        self._chooser = TorchChooser(chip, graphs=graphs)
        self._take_memory(artifact)

    def _take_memory(self, artifact: LoadedArtifact) -> None:
        chip, manifest = self._chip, artifact.manifest
        with chip.active():
            pool = chip.allocate(fixed_bytes(self._plan))
            at = aligned(manifest.weights_bytes)
            self._inputs_at = at
            staged = 0
            for region, size in order_regions(self._plan).items():
                self._memory[region] = pool[at : at + size]
                at += aligned(size)
                staged = at if region[0] == "input" else staged
            poison_end = at - sum(aligned(self._memory[r].numel()) for r in (SCRATCH, *SIDES))
            self._input_pool = pool[self._inputs_at : staged]
            self._poisoned = pool[staged:poison_end]
            self._upload(artifact, pool)
        self._staging = chip.staging(staged - self._inputs_at)
        self._staging_bytes = self._staging.numpy()

    def _upload(self, artifact: LoadedArtifact, pool: torch.Tensor) -> None:
        """Copy the weights from the mapped file to where its offsets say; what is not there is
        left to who opened the artifact."""
        for weight in artifact.manifest.weights:
            target = pool[weight.offset : weight.offset + weight.num_bytes]
            self._memory["weight", weight.name] = target
            if weight.name in artifact.weights:
                source = artifact.weights[weight.name].reshape(-1).view(np.uint8)
                target.copy_(as_torch(source, "u8"))

    def close(self) -> None:
        """Give the memory back."""
        self._graphs.clear()
        self._tables.clear()
        self._memory.clear()
        self._chooser.close()
        self._ready = None
        del self._input_pool, self._poisoned

    def allocate_states(self, dims: Mapping[str, int]) -> None:
        """Make zeroed states of these dims; earlier ones, and graphs that use them, are dropped."""
        self._graphs.clear()
        self._tables.clear()
        self._ready = None
        sizes = self._plan.state_bytes(dims)
        for region in sizes:
            self._memory.pop(region, None)
        with self._chip.active():
            pool = self._chip.allocate(sum(aligned(size) for size in sizes.values()))
        at = 0
        for region, size in sizes.items():
            self._memory[region] = pool[at : at + size]
            at += aligned(size)
        self._state_dims = dict(dims)

    def state(self, name: str, dims: Mapping[str, int]) -> Array:
        """Return a copy of a state."""
        with self._chip.active():
            return _on_host(self._view(("state", name), 0, dims))

    def cache_memory(self, layout: CacheLayout) -> GpuStateMemory:
        """Return what copies between the states and snapshots."""

        def view(name: str) -> torch.Tensor:
            return self._view(("state", name), 0, self._state_dims)

        return GpuStateMemory(self._chip, view, layout)

    # --- steps ----------------------------------------------------------------------------------

    def write_inputs(self, step: Step, inputs: Mapping[str, Array]) -> None:
        """Take arrays that have the types and shapes the step wants, padded if it is."""
        if step is not self._ready:
            self._prepare(step)
        self._chip.wait_for_copies()
        for name, view in self._input_views.items():
            fill(view, inputs[name], self._padding[name])

    def _prepare(self, step: Step) -> None:
        manifest, bucket = self._plan.manifest, step.bucket
        self._is_graph = self._has_graphs and _num_tokens(bucket, step) <= GRAPH_TOKENS
        self._dims: Mapping[str, int] = step.dims
        if self._is_graph:
            self._dims = padded_dims(manifest, bucket, step.dims, self._state_dims)
        self._input_views: dict[str, Array] = {}
        self._num_staged = 0
        for record in manifest.inputs:
            size = tensor_bytes(record, self._dims)
            start = self._offset(("input", record.name))
            self._num_staged = max(self._num_staged, start + size)
            part = self._staging_bytes[start : start + size]
            typed = part.view(TYPES[record.dtype].numpy)
            self._input_views[record.name] = typed.reshape(bound_shape(record, self._dims))
        self._outputs = {t.name: self._cut(t.name, step.dims) for t in manifest.outputs}
        self._ready = step

    def run(self, step: Step) -> None:
        """Launch the step's kernels. Raises LaunchFailed for the first that fails."""
        with self._chip.active():
            self._start()
            table = self._table(step.bucket)
            if not self._is_graph:
                table.launch(self._dims)
                return
            key = (step.bucket.name, tuple(self._dims.items()))
            replay = self._graphs.get(key)
            if replay is not None:
                replay()
                return
            # The first step of a shape runs launch by launch, which checks every argument and
            # loads every kernel; recording then runs nothing, so states are advanced once.
            table.launch(self._dims)
            self._graphs[key] = self._chip.capture(self.recording(step.bucket))

    def recording(self, bucket: BucketRecord) -> Callable[[], None]:
        """Return what issues the launches of the present step to several streams, for a graph."""
        if bucket.name not in self._turns:
            self._turns[bucket.name] = turns_of(self._plan, bucket)
        turns = self._turns[bucket.name]
        lanes = [self._table(bucket, lane).singly(self._dims) for lane in range(LANES)]
        launches = [lanes[turn.lane][i] for i, turn in enumerate(turns)]
        return lambda: self._chip.issue(launches, turns)

    def _start(self) -> None:
        """Copy the inputs, and poison what the step has to write."""
        count = self._num_staged
        self._chip.copy(self._input_pool[:count], self._staging[:count])
        if self._poison:
            self._poisoned.fill_(POISON)

    def time_launches(self, step: Step) -> Sequence[float]:
        """Launch the step's kernels one by one; return the seconds of each."""
        with self._chip.active():
            self._start()
            return self._chip.timed(self._table(step.bucket).singly(self._dims))

    def observe(self, step: Step, observer: Observer) -> None:
        """Launch the step's kernels one by one, showing copies of what each reads and writes."""
        with self._chip.active():
            self._start()
            singly = self._table(step.bucket).singly(self._dims)
            for launch_id, launch in enumerate(step.bucket.launches):
                ints = [evaluate(extent, self._dims) for extent in launch.ints]
                arguments = launch.arguments
                observer.before(launch, [self._copied(a, step.bucket) for a in arguments], ints)
                singly[launch_id]()
                observer.after(launch, [self._copied(a, step.bucket) for a in arguments], ints)

    def _copied(self, argument: Argument, bucket: BucketRecord) -> Array:
        if argument.kind == "weight":
            return self._weights[argument.name]
        region, offset, record = self._plan.locate(argument, bucket)
        part = self._memory[region][offset : offset + tensor_bytes(record, self._dims)]
        typed = part.view(TYPES[record.dtype].tensor_type).reshape(bound_shape(record, self._dims))
        return _on_host(typed)

    def outputs(self, step: Step) -> Mapping[str, torch.Tensor]:
        """Return views of the outputs on the GPU, valid until the next step."""
        return self._outputs

    def host_outputs(self, step: Step) -> Mapping[str, Array]:
        """Return copies of the outputs."""
        with self._chip.active():
            return {name: _on_host(view) for name, view in self._outputs.items()}

    def chooser(self) -> Chooser:
        """Return the sampler that works on the GPU."""
        return self._chooser

    # --- memory ---------------------------------------------------------------------------------

    def _table(self, bucket: BucketRecord, lane: int = 0) -> GpuTable:
        """Return a bucket's launches, with the scratch of a stream."""
        table = self._tables.get((bucket.name, lane))
        if table is None:

            def address_of(region: Region) -> int:
                own = SIDES[lane - 1] if lane and region == SCRATCH else region
                return self._memory[own].data_ptr()

            slots, calls = lay_out(self._plan, bucket, address_of)
            layout = LaunchLayout(self._library.addresses, slots, calls, self._chip.place)
            table = self._tables[bucket.name, lane] = GpuTable(layout)
        return table

    def _offset(self, region: Region) -> int:
        """Return where an input starts, in staging memory as on the GPU."""
        return self._memory[region].data_ptr() - self._input_pool.data_ptr()

    def _cut(self, name: str, exact: Mapping[str, int]) -> torch.Tensor:
        """Return an output of a padded step, cut to the step itself."""
        record = self._plan.records["output", name]
        whole = self._view(("output", name), 0, self._dims)
        return whole[tuple(np.s_[:n] for n in bound_shape(record, exact))]

    def _view(self, region: Region, offset: int, dims: Mapping[str, int]) -> torch.Tensor:
        record = self._plan.records[region]
        part = self._memory[region][offset : offset + tensor_bytes(record, dims)]
        return part.view(TYPES[record.dtype].tensor_type).reshape(bound_shape(record, dims))


def _num_tokens(bucket: BucketRecord, step: Step) -> int:
    """Return the most tokens a step of the bucket has."""
    return bucket.bounds.get("tokens", max(step.given.values(), default=1))


def _on_host(tensor: torch.Tensor) -> Array:
    """Copy a tensor to the host: bf16 as uint16."""
    copied = tensor.detach().to("cpu", copy=True)
    if copied.dtype == torch.bfloat16:
        copied = copied.view(torch.uint16)
    found: Any = copied.numpy()
    array: Array = found
    return array
