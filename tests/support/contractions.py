"""One contraction kernel in many schedules, launched by itself on packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.toolchain import QuickToolchain
from support.weights import RandomWeights
from tilewright.codegen.body import extract
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.emit.cpp import argument_names, emit, int_names
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pack import pack_weights
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import GroupPlan
from tilewright.codegen.select import select
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.codegen.target import Target
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
GUARD = 256  # bytes after scratch and outputs that no kernel may touch


def spread(schedules: Sequence[Schedule], count: int) -> list[Schedule]:
    """The first schedule, and others at even distances."""
    picks = np.linspace(0, len(schedules) - 1, min(count, len(schedules))).astype(int)
    return [schedules[i] for i in dict.fromkeys(picks.tolist())]


class Contraction:
    """The only kernel of a graph in chosen schedules: of few rows and of many."""

    def __init__(
        self,
        graph: Graph,
        target: Target,
        cache: Path,
        *,
        rows: Sequence[int] = (1, 64),
        count: int = 4,
        weights: RandomWeights | None = None,
    ) -> None:
        lowered = lower(graph, Flags()).graph
        (group,) = lowered.groups
        self.body = extract(lowered, group)
        choice = select(group, self.body, target)
        self.template, body = choice.template, self.body.graph
        numerics = derive(group.kind, body, target)
        lists = [spread(self.template.schedules(body, numerics, n), count) for n in rows]
        chosen = dict.fromkeys(s for found in lists for s in found)
        self.specs = [
            KernelSpec("contract", body, self.template.name, numerics, s, self.body.buffers)
            for s in chosen
        ]
        plan = GroupPlan(group, self.body, choice, {"": self.specs[0]})
        self.weights = weights or RandomWeights(lowered)
        self._packed = {
            p.weight.name: aligned(p.data) for p in pack_weights(lowered, [plan], self.weights)
        }
        self._library = self._build(target, cache)

    def _build(self, target: Target, cache: Path) -> CpuLibrary:
        sources = [emit(s, self.template) for s in self.specs]
        name = f"all_{sources[0].name}_{len(sources)}"
        text = "\n".join(s.text for s in sources)
        toolchain = QuickToolchain(target, cache)
        built = KernelCache(cache, toolchain).build(
            [KernelSource(name, "cpp", text)], jobs=1, progress=lambda *_: None
        )
        path = cache / f"{built.objects[0].stem}.so"
        toolchain.link(built.objects, path)
        return CpuLibrary(path, [s.name for s in sources])

    def run(
        self,
        spec: KernelSpec,
        inputs: Mapping[str, Array],
        dims: Mapping[str, int],
        *,
        threads: int = 2,
        seconds: Array | None = None,
    ) -> dict[str, Array]:
        """Launch on arrays by model name; outputs start as NaN or -1, scratch as NaN."""
        body, slots, found, keep = spec.body, [], {}, []
        outputs = {value for _, value in body.outputs}
        for name in argument_names(body):
            bound = self.body.binding[name]
            stored = spec.stored_type(name)
            dtype, shape = str(stored.dtype), tuple(evaluate(d, dims) for d in stored.shape)
            if bound in self._packed:
                array = self._packed[bound]
                dtype, shape = "u8", array.shape
            elif name in outputs:
                size = int(np.prod(shape)) * numpy_type(dtype).itemsize
                memory = allocate(size + GUARD)
                memory[:] = 0xFF
                array = found[bound] = memory[:size].view(numpy_type(dtype)).reshape(shape)
                keep.append(memory)
            else:
                array = aligned(inputs[bound])
                assert array.shape == shape, (bound, array.shape, shape)
            slots.append(Slot(array.ctypes.data, dtype, shape))
            keep.append(array)
        need = self.template.scratch_bytes(body, spec.numerics, spec.schedule, dims)
        size = -(-need // 64) * 64 * threads
        scratch = allocate(size + GUARD)
        scratch[:] = 0xFF
        slots.append(Slot(scratch.ctypes.data, "u8", (size,)))
        call = Call(spec.symbol, tuple(range(len(slots))), tuple(dims[n] for n in int_names(body)))
        times = 1 if seconds is None else len(seconds)
        pool = CpuPool(self._library, threads)
        LaunchTable(self._library, slots, [call] * times).run(pool, {}, seconds)
        pool.close()
        assert (scratch[size:] == 0xFF).all(), f"{spec.schedule} wrote past its workspace"
        for array in keep:
            if array.dtype == np.uint8 and len(array) >= GUARD and any(
                o.base is array for o in found.values()
            ):
                assert (array[-GUARD:] == 0xFF).all(), f"{spec.schedule} wrote past an output"
        return {n: a.copy() for n, a in found.items()}


def aligned(array: Array) -> Array:
    """The array itself, or a copy where kernels may read it."""
    if array.ctypes.data % 64 == 0 and array.flags.c_contiguous:
        return array
    memory = allocate(array.nbytes).view(array.dtype).reshape(array.shape)
    memory[...] = array
    return memory

