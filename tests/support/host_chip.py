"""A GPU made of host memory: kernels of a CPU library, graphs that are launched again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tilewright.runtime.artifact import Manifest
from tilewright.runtime.artifact_files import LoadedArtifact
from tilewright.runtime.devices.gpu import GpuSession
from tilewright.runtime.devices.gpu_library import GpuLibrary
from tilewright.runtime.devices.launch_table import CPU, Place
from tilewright.runtime.devices.memory import Bytes, map_file
from tilewright.runtime.lanes import LANES, Turn


class HostChip:
    """Counts what a session asks of it. Copies to it land late, as they do on a GPU."""

    def __init__(self) -> None:
        self.place = Place(CPU, 0)
        self.device = torch.device("cpu")
        self.num_captured = self.num_replayed = 0
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._random = random.Random()

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.full((max(num_bytes, 1),), 0xFF, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.zeros(max(num_bytes, 1) + 256, dtype=torch.uint8)
        start = -memory.data_ptr() % 256
        return memory[start : start + num_bytes]

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        self._pending.append((source, source.clone()))

    def wait_for_copies(self) -> None:
        for source, before in self._pending:
            assert torch.equal(source, before), "staging memory was written during a copy"
        self._pending.clear()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            launch()

        return replay

    def issue(self, launches: Sequence[Callable[[], None]], turns: Sequence[Turn]) -> None:
        """Run lanes in a random order that their turns allow."""
        queues = [[i for i, t in enumerate(turns) if t.lane == lane] for lane in range(LANES)]
        done: set[int] = set()
        while any(queues):
            ready = [q for q in queues if q and done.issuperset(turns[q[0]].after)]
            index = self._random.choice(ready).pop(0)
            launches[index]()
            done.add(index)

    def timed(self, launches: Sequence[Callable[[], None]]) -> Sequence[float]:
        seconds = []
        for launch in launches:
            start = time.perf_counter()
            launch()
            seconds.append(time.perf_counter() - start)
        return seconds


class HostGpu:
    """The device of a `HostChip`."""

    def __init__(self, *, graphs: bool = True) -> None:
        self.chip = HostChip()
        self.graphs = graphs

    def check(self, manifest: Manifest) -> None:
        pass

    def cache_blocks(self, manifest: Manifest, wanted: int, *, is_exact: bool) -> int:
        return wanted

    def load_library(self, path: Path, symbols: Sequence[str]) -> GpuLibrary:
        return GpuLibrary(path, symbols)

    def load_weights(self, path: Path) -> Bytes:
        return map_file(path)

    def open(self, artifact: LoadedArtifact, *, poison: bool = False) -> GpuSession:
        return GpuSession(artifact, self.chip, poison=poison, graphs=self.graphs)
