"""How long kernels take, alone: all candidates of one body in one library, run in turns on random
operands that come from memory, as in a real step. The median is what counts.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.arguments import int_names, needs_scratch
from tilewright.codegen.body import Body
from tilewright.codegen.cache import KernelCache, Progress
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.plan import Bucket
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import Target, Toolchain
from tilewright.graph.errors import TargetError
from tilewright.runtime.devices.cpu import (
    Call,
    CpuLibrary,
    CpuPool,
    LaunchFailed,
    LaunchTable,
    Slot,
    allocate,
    default_num_threads,
)
from tilewright.tools.synthetic import Operand, Step, operands, plausible_step

JOINED = 4  # candidates in one source
ROUNDS = 5
IMPLAUSIBLE = 3.0  # a candidate this many times slower than the best at first is not run again
ROTATED_BYTES = 256 << 20  # as much as the read loop of the bench walks over
CONTEXT = 512


def machine_name(num_threads: int | None = None) -> str:
    """Return what a measurement holds for: the processor's name and the number of threads."""
    return f"{_cpu_model()}, {num_threads or default_num_threads()} threads"


def _cpu_model() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(errors="replace").splitlines() if cpu.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lines)}
    return fields.get("model name") or fields.get("CPU part") or platform.machine()


class CpuMeasure:
    """Measures candidates on this machine: a `codegen.tune.Measure`.

    `seconds`: time to spend on running the candidates of one body; compiling comes on top.
    `cache`: folder of compiled kernels. Raises TargetError if a candidate does not build or run.
    """

    def __init__(
        self, target: Target, toolchain: Toolchain, cache: Path, *, jobs: int = 1,
        num_threads: int | None = None, seconds: float = 2.0, rotated_bytes: int = ROTATED_BYTES,
        context: int = CONTEXT, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        if target.name != "cpu":
            raise TargetError(
                f"target '{target.name}': cannot be measured: got kernels for another device, want "
                "target 'cpu'; compile without --tune"
            )
        self._templates = {t.name: t for t in target.kernels}
        self._toolchain = toolchain
        self._cache = KernelCache(cache, toolchain)
        self._jobs = jobs
        self._num_threads = num_threads or default_num_threads()
        self._seconds, self._rotated_bytes, self._context = seconds, rotated_bytes, context
        self._progress: Progress = progress or (lambda stage, done, total: None)

    def __call__(self, specs: Sequence[KernelSpec], body: Body, bucket: Bucket) -> Sequence[float]:
        """Return the seconds of one launch of each candidate, for steps that fill the bucket."""
        step = plausible_step(body.graph, bucket.bounds, context=self._context)
        arguments = operands(specs[0], step, rotated_bytes=self._rotated_bytes)
        library = self._library(specs)
        scratch = allocate(max(self._scratch_bytes(spec, step.dims) for spec in specs))
        pool = CpuPool(library, self._num_threads)
        try:
            runs = [Run(library, pool, spec, step, arguments, scratch) for spec in specs]
            return time_in_turns(runs, seconds=self._seconds)
        finally:
            pool.close()

    def _library(self, specs: Sequence[KernelSpec]) -> CpuLibrary:
        """Build all candidates into one library; the file is gone once it is loaded."""
        sources = {s.symbol: emit(s, self._templates[s.template]) for s in specs}
        parts = joined(list(sources.values()))
        built = self._cache.build(parts, jobs=self._jobs, progress=self._progress)
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            path = Path(folder) / "candidates.so"
            self._toolchain.link(built.objects, path)
            return CpuLibrary(path, list(sources))

    def _scratch_bytes(self, spec: KernelSpec, dims: Mapping[str, int]) -> int:
        template = self._templates[spec.template]
        need = template.scratch_bytes(spec.body, spec.numerics, spec.schedule, dims)
        return max(64, -(-need // 64) * 64) * self._num_threads


def joined(sources: Sequence[KernelSource]) -> list[KernelSource]:
    """Join every few sources into one: reading the headers takes longer than a kernel."""
    groups = [sources[at : at + JOINED] for at in range(0, len(sources), JOINED)]
    return [
        KernelSource(f"candidates_{group[0].name}", group[0].language,
                     "\n".join(source.text for source in group))
        for group in groups
    ]  # fmt: skip


class Run:
    """One candidate, ready to be launched on the copies of its operands in turn."""

    def __init__(
        self, library: CpuLibrary, pool: CpuPool, spec: KernelSpec, step: Step,
        arguments: Sequence[Operand], scratch: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        self._library, self._pool, self._symbol = library, pool, spec.symbol
        workspace = (Operand("u8", (scratch,)),) if needs_scratch(spec.kind) else ()
        self._operands = (*arguments, *workspace)
        self._ints = tuple(step.dims[name] for name in int_names(spec.body))
        self.num_copies = max(len(o.arrays) for o in self._operands)
        self._tables: dict[int, tuple[LaunchTable, NDArray[Any]]] = {}

    def seconds(self, num_launches: int) -> list[float]:
        """Launch as often and return the seconds of each launch."""
        if num_launches not in self._tables:
            self._tables[num_launches] = self._table(num_launches), np.zeros(num_launches)
        table, times = self._tables[num_launches]
        try:
            table.run(self._pool, {}, times)
        except LaunchFailed as error:
            raise TargetError(f"kernel '{self._symbol}': failed while measured: {error}") from None
        return [float(t) for t in times]

    def _table(self, num_launches: int) -> LaunchTable:
        slots: list[Slot] = []
        places: dict[int, int] = {}
        calls = []
        for launch_id in range(num_launches):
            ids = []
            for operand in self._operands:
                array = operand.arrays[launch_id % len(operand.arrays)]
                if id(array) not in places:
                    places[id(array)] = len(slots)
                    slots.append(Slot(array.ctypes.data, operand.dtype, array.shape))
                ids.append(places[id(array)])
            calls.append(Call(self._symbol, tuple(ids), self._ints))
        return LaunchTable(self._library, slots, calls)


def time_in_turns(runs: Sequence[Run], *, seconds: float) -> list[float]:
    """Return the median time of a launch of each run, spending about `seconds` in all.

    Rounds are interleaved, so that a busy moment of the machine meets all of them.
    """
    first = [min(run.seconds(1)[0] for _ in range(2)) for run in runs]
    limit = IMPLAUSIBLE * min(first)
    plausible = [i for i, t in enumerate(first) if t <= limit]
    share = seconds / (ROUNDS * sum(first[i] for i in plausible))
    found: dict[int, list[float]] = {i: [] for i in plausible}
    for _ in range(ROUNDS):
        for i in plausible:
            found[i] += runs[i].seconds(max(1, min(int(share), runs[i].num_copies)))
    return [median(found[i]) if i in found else t for i, t in enumerate(first)]
