"""Kernels of one body launched by themselves: many schedules in one library, poisoned memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.toolchain import QuickToolchain
from tilewright.codegen.body import Body, extract
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.emit.cpp import argument_names, emit, int_names
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.select import select
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec, Numerics, Schedule
from tilewright.codegen.target import KernelTemplate, Target
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate
from tilewright.runtime.devices.cpu import (
    Call,
    CpuLibrary,
    CpuPool,
    LaunchTable,
    Slot,
    allocate,
    numpy_type,
)

Array = NDArray[Any]
GUARD = 256  # bytes after scratch that no kernel may touch


class Kernels:
    """Every given schedule of the only kernel of a graph, in one library."""

    def __init__(
        self,
        graph: Graph,
        target: Target,
        cache: Path,
        *,
        rows: int = 16,
        picked: Sequence[int] | None = None,
        chunk: int | None = None,
    ) -> None:
        lowered = lower(graph, Flags()).graph
        (group,) = [g for g in lowered.groups if g.kind != "row"] or lowered.groups[:1]
        self.body: Body = extract(lowered, group)
        self.template: KernelTemplate = select(group, self.body, target).template
        numerics = derive(group.kind, self.body.graph, target)
        if chunk:
            numerics = Numerics(**{**numerics.to_json(), "chunk": chunk})  # type: ignore[arg-type]
        schedules = self.template.schedules(self.body.graph, numerics, rows)
        self.num_legal = len(schedules)
        chosen = dict.fromkeys(i % len(schedules) for i in picked or range(len(schedules)))
        self.specs = [self._spec(group.kind, numerics, schedules[i]) for i in chosen]
        self._library = self._build(target, cache)
        self._pools: dict[int, CpuPool] = {}

    def _spec(self, kind: str, numerics: Numerics, schedule: Schedule) -> KernelSpec:
        return KernelSpec(
            kind, self.body.graph, self.template.name, numerics, schedule, self.body.buffers
        )

    def _build(self, target: Target, cache: Path) -> CpuLibrary:
        sources = [emit(s, self.template) for s in self.specs]
        toolchain = QuickToolchain(target, cache)
        joined = [
            KernelSource(f"all_{part[0].name}", "cpp", "\n".join(s.text for s in part))
            for part in (sources[i : i + 6] for i in range(0, len(sources), 6))
        ]
        built = KernelCache(cache, toolchain).build(joined, jobs=2, progress=lambda *_: None)
        path = cache / f"alone-{abs(hash(tuple(s.name for s in sources))):x}.so"
        toolchain.link(built.objects, path)
        library = CpuLibrary(path, [s.name for s in sources])
        path.unlink()
        return library

    def scratch_bytes(self, spec: KernelSpec, dims: Mapping[str, int]) -> int:
        """Bytes of workspace a thread, as the plan counts them."""
        need = self.template.scratch_bytes(spec.body, spec.numerics, spec.schedule, dims)
        return -(-need // 64) * 64

    def run(
        self,
        spec: KernelSpec,
        arrays: Mapping[str, Array],
        dims: Mapping[str, int],
        *,
        threads: int = 2,
        seconds: Array | None = None,
    ) -> dict[str, Array]:
        """Launch once on operands by model name; outputs start as NaN or -1, scratch as NaN."""
        body = spec.body
        outputs = {value for _, value in body.outputs}
        slots, found = [], {}
        keep: list[Array] = []
        for name in argument_names(body):
            stored = spec.stored_type(name)
            shape = tuple(evaluate(d, dims) for d in stored.shape)
            dtype = "u8" if str(stored.dtype) == "u8" else str(stored.dtype)
            if name in outputs:
                memory = allocate(int(np.prod(shape)) * numpy_type(dtype).itemsize)
                memory[:] = 0xFF
                array = memory.view(numpy_type(dtype)).reshape(shape)
                found[self.body.binding[name]] = array
            else:
                given = arrays[self.body.binding[name]]
                assert given.shape == shape, (self.body.binding[name], given.shape, shape)
                array = aligned(given)
            keep.append(array)
            slots.append(Slot(array.ctypes.data, dtype, shape))
        size = self.scratch_bytes(spec, dims) * threads
        scratch = allocate(size + GUARD)
        scratch[:] = 0xFF
        slots.append(Slot(scratch.ctypes.data, "u8", (size,)))
        ints = tuple(dims[name] for name in int_names(body))
        times = 1 if seconds is None else len(seconds)
        call = Call(spec.symbol, tuple(range(len(slots))), ints)
        LaunchTable(self._library, slots, [call] * times).run(self._pool(threads), {}, seconds)
        assert (scratch[size:] == 0xFF).all(), f"{spec.schedule} wrote past its workspace"
        return found

    def _pool(self, threads: int) -> CpuPool:
        if threads not in self._pools:
            self._pools[threads] = CpuPool(self._library, threads)
        return self._pools[threads]

    def close(self) -> None:
        """Stop all threads."""
        for pool in self._pools.values():
            pool.close()


def aligned(array: Array) -> Array:
    """The array itself, or a copy where kernels may read it."""
    if array.ctypes.data % 64 == 0 and array.flags.c_contiguous:
        return array
    memory = allocate(array.nbytes).view(array.dtype).reshape(array.shape)
    memory[...] = array
    return memory


def equal_bytes(first: Mapping[str, Array], others: Sequence[Mapping[str, Array]]) -> bool:
    """Say whether every output has the same bytes everywhere."""
    return all(first[n].tobytes() == o[n].tobytes() for o in others for n in first)
