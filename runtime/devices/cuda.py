"""NVIDIA GPUs as devices: what the machine has, memory that is planned, a stream, graphs.

torch gives memory, streams and graphs; kernels are the artifact's own, launched by its library.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewright.runtime.artifact import Manifest
from tilewright.runtime.cache import page_counts
from tilewright.runtime.cache_layout import ring_widths
from tilewright.runtime.devices.chip import FreeMemory, Replay
from tilewright.runtime.devices.cuda_checks import (
    CudaFacts,
    MemoryNeeds,
    check_machine,
    check_memory,
    check_target,
)
from tilewright.runtime.devices.ffi import stream_of
from tilewright.runtime.devices.gpu import GRAPH_TOKENS, GpuSession, fixed_bytes
from tilewright.runtime.devices.gpu_library import GpuLibrary
from tilewright.runtime.devices.launch_table import CUDA, Place
from tilewright.runtime.devices.memory import Bytes, map_file
from tilewright.runtime.devices.padding import next_power
from tilewright.runtime.lanes import LANES, Turn
from tilewright.runtime.plan_memory import PlanMemory

if TYPE_CHECKING:
    from tilewright.runtime.artifact_files import LoadedArtifact

# What a captured launch takes on the GPU, measured with driver 580 (docs/nvidia.md), rounded up.
LAUNCH_GRAPH_BYTES = 8 << 10
SAMPLED_ROWS = 32  # rows of logits that are sampled at once
SAMPLER_BYTES = 96  # per row and vocabulary entry
SPARE = 256 << 20  # left to the driver and to torch


class CudaChip:
    """A GPU of this machine, and a stream of this executor's own on it."""

    def __init__(self, index: int) -> None:
        self.place = Place(CUDA, index)
        self.device = torch.device("cuda", index)
        cuda: Any = torch.cuda  # its classes have no types
        self._stream = cuda.Stream(self.device)
        self._lanes = (self._stream, *(cuda.Stream(self.device) for _ in range(1, LANES)))
        self._copied = cuda.Event()
        self._captured: weakref.WeakSet[Any] = weakref.WeakSet()

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Return pinned host memory."""
        return torch.zeros(max(num_bytes, 1), dtype=torch.uint8, pin_memory=True)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory; torch aligns it to 512 bytes."""
        return torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=self.device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Issue this thread's work to the stream."""
        with (
            torch.cuda.device(self.device),
            torch.cuda.stream(self._stream),
            stream_of(self.place, self._stream.cuda_stream),
        ):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy from pinned memory."""
        target.copy_(source, non_blocking=True)
        self._copied.record(self._stream)

    def wait_for_copies(self) -> None:
        """Wait until the last copy has read pinned memory."""
        self._copied.synchronize()

    def capture(self, launch: Callable[[], None]) -> Replay:
        """Record launches as a CUDA graph; return its replay."""
        graph = torch.cuda.CUDAGraph()
        if not self._captured:  # torch forgets a pool with the last of its graphs
            # Graphs run one after the other and keep nothing: they share what sampling allocates.
            self._graph_pool = torch.cuda.graph_pool_handle()
        # Other threads may use the GPU meanwhile, so only this one is watched for illegal calls.
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        self._captured.add(graph)
        return graph.replay

    def issue(self, launches: Sequence[Callable[[], None]], turns: Sequence[Turn]) -> None:
        """Issue launches to streams; all that are used begin and end with the first."""
        cuda: Any = torch.cuda
        used = {turn.lane for turn in turns}
        sides = [lane for i, lane in enumerate(self._lanes) if i in used and i]
        for side in sides:
            side.wait_stream(self._stream)
        awaited = {j for turn in turns for j in turn.after}
        done: dict[int, Any] = {}
        for i, (launch, turn) in enumerate(zip(launches, turns, strict=True)):
            stream = self._lanes[turn.lane]
            for j in turn.after:
                stream.wait_event(done[j])
            with stream_of(self.place, stream.cuda_stream):
                launch()
            if i in awaited:
                done[i] = cuda.Event()
                done[i].record(stream)
        for side in sides:
            self._stream.wait_stream(side)

    def timed(self, launches: Sequence[Callable[[], None]]) -> Sequence[float]:
        """Run launches one after the other; return the seconds of each."""
        cuda: Any = torch.cuda
        events = [cuda.Event(enable_timing=True) for _ in range(len(launches) + 1)]
        events[0].record(self._stream)
        for launch, event in zip(launches, events[1:], strict=True):
            launch()
            event.record(self._stream)
        events[-1].synchronize()
        pairs = zip(events, events[1:], strict=False)
        return [before.elapsed_time(after) * 1e-3 for before, after in pairs]


class CudaDevice:
    """A GPU of this machine, by index. `graphs`: capture small steps as CUDA graphs."""

    def __init__(self, index: int = 0, *, graphs: bool = True) -> None:
        self.index = index
        self.graphs = graphs

    def check(self, manifest: Manifest) -> None:
        """Raise ArtifactError unless this GPU can run kernels built for the target."""
        facts = find_facts(self.index)
        check_machine(facts, self.index)
        check_target(facts, manifest.target)

    def memory(self) -> FreeMemory:
        """Return how much memory the GPU has."""
        return FreeMemory(*torch.cuda.mem_get_info(self.index))

    def name(self) -> str:
        """Return the name of the GPU."""
        return torch.cuda.get_device_name(self.index)

    def cache_blocks(self, manifest: Manifest, wanted: int, *, is_exact: bool) -> int:
        """Return how many blocks the cache gets: `wanted`, or what fits if that was a default.

        Raises ArtifactError, with the numbers, if not even one full context fits.
        """
        free = self.memory().free - SPARE
        size = manifest.model.block_size
        least = wanted if is_exact else min(wanted, -(-manifest.model.max_context // size))
        plan = PlanMemory(manifest, 1)
        check_memory(memory_needs(plan, least, self.graphs), free, self.name(), least * size)
        most = most_blocks(plan, free, graphs=self.graphs)
        return min(wanted, max(most, least))

    def load_library(self, path: Path, symbols: Sequence[str]) -> GpuLibrary:
        """Load an artifact's kernels; raise ArtifactError if one is missing."""
        return GpuLibrary(path, symbols)

    def load_weights(self, path: Path) -> Bytes:
        """Return the weights mapped: they are read once, to be uploaded."""
        return map_file(path)

    def open(self, artifact: LoadedArtifact, *, poison: bool = False) -> GpuSession:
        """Take the memory of one executor."""
        return GpuSession(artifact, CudaChip(self.index), poison=poison, graphs=self.graphs)


def memory_needs(plan: PlanMemory, cache_blocks: int, graphs: bool) -> MemoryNeeds:
    """Return what an engine takes of a GPU."""
    manifest = plan.manifest
    vocab, rows = manifest.model.vocab_size, SAMPLED_ROWS
    cache = sum(plan.state_bytes(page_counts(manifest, cache_blocks)).values())
    return MemoryNeeds(
        weights=manifest.weights_bytes,
        working=fixed_bytes(plan) - manifest.weights_bytes + rows * vocab * SAMPLER_BYTES,
        graphs=graph_bytes(plan) if graphs else 0,
        cache=cache,
    )


def graph_bytes(plan: PlanMemory) -> int:
    """Return what all graphs take together if every one is captured."""
    total, fixed = 0, ring_widths(plan.manifest)
    for bucket in plan.buckets:
        if bucket.bounds.get("tokens", 0) > GRAPH_TOKENS:
            continue
        shapes = 1
        for dim in plan.manifest.dims:
            if dim.role != "batch" and dim.name not in fixed:
                shapes *= next_power(bucket.bounds.get(dim.name, dim.upper)).bit_length()
        total += shapes * len(bucket.launches) * LAUNCH_GRAPH_BYTES
    return total


def most_blocks(plan: PlanMemory, free: int, *, graphs: bool) -> int:
    """Return how many blocks of cache fit beside everything else; the cache grows linearly."""
    none, one = (memory_needs(plan, n, graphs).total for n in (0, 1))
    return max(free - none, 0) // max(one - none, 1)


def find_facts(index: int) -> CudaFacts:
    """Look at the driver, the GPUs and torch."""
    built = torch.version.cuda
    torch_cuda = None if built is None else _version(built)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return CudaFacts(None, None, torch.__version__, torch_cuda)
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    version = (number.value // 1000, number.value % 1000 // 10)
    no_gpu = _failure(driver, driver.cuInit(0))
    if no_gpu is not None or torch_cuda is None or version[0] < torch_cuda[0]:
        return CudaFacts(version, no_gpu, torch.__version__, torch_cuda)
    count = torch.cuda.device_count()
    name = torch.cuda.get_device_name(index) if index < count else ""
    capability = torch.cuda.get_device_capability(index) if index < count else (0, 0)
    return CudaFacts(version, None, torch.__version__, torch_cuda, count, name, capability)


def _failure(driver: ctypes.CDLL, code: int) -> str | None:
    """Return the driver's text for a result code, None for success."""
    if code == 0:
        return None
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or f"error {code}".encode()).decode(errors="replace")


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
