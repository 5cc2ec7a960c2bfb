"""One kernel of a graph of one group, in every schedule, run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support import triton_run
from tilewright.codegen.body import extract
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.select import select
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.codegen.target import Target
from tilewright.graph import Graph

_POISON = {"bf16": (torch.bfloat16, torch.nan), "f32": (torch.float32, torch.nan),
           "i32": (torch.int32, -7)}  # fmt: skip


class Interpreted:
    """`chunk`: another one than the target's."""

    def __init__(
        self, graph: Graph, target: Target, folder: Path, *, chunk: int | None = None
    ) -> None:
        lowered = lower(graph, Flags()).graph
        (group,) = lowered.groups
        self.body, self.folder = extract(lowered, group), folder
        self.kind = group.kind
        self.template = select(group, self.body, target).template
        numerics = derive(self.kind, self.body.graph, target)
        self.numerics = replace(numerics, chunk=chunk) if chunk else numerics

    def schedules(self, rows: int) -> tuple[Schedule, ...]:
        """Schedules for steps of up to so many rows."""
        return self.template.schedules(self.body.graph, self.numerics, rows)

    def distinct(self) -> list[Schedule]:
        """Those of different texts: warps and stages are the compiler's alone."""
        found = [s for rows in (1, 100) for s in self.schedules(rows)]
        texts = {
            tuple((k, v) for k, v in s.params if k not in ("warps", "stages")): s for s in found
        }
        return list(texts.values())

    def spec(self, schedule: Schedule) -> KernelSpec:
        """The kernel in one schedule."""
        return KernelSpec(self.kind, self.body.graph, self.template.name, self.numerics, schedule,
                          self.body.buffers)  # fmt: skip

    def run(
        self, schedule: Schedule, arrays: Mapping[str, Any], dims: Mapping[str, int]
    ) -> torch.Tensor:
        """Return the only output, which was poisoned, as was the workspace."""
        spec = self.spec(schedule)
        module = triton_run.load(emit(spec, self.template).text, spec.symbol, self.folder)
        need = self.template.scratch_bytes(spec.body, spec.numerics, schedule, dims)
        arguments = {n: self._operand(spec, n, arrays, dims) for n in self.body.binding}
        arguments["workspace"] = torch.full((need,), 255, dtype=torch.uint8)
        triton_run.run(module, arguments, dims)
        ((_, result),) = spec.body.outputs
        return arguments[result]

    def _operand(
        self, spec: KernelSpec, name: str, arrays: Mapping[str, Any], dims: Mapping[str, int]
    ) -> torch.Tensor:
        array, type_ = arrays.get(self.body.binding[name]), spec.stored_type(name)
        if array is None:
            dtype, poison = _POISON[str(type_.dtype)]
            shape = dims["tokens"], *(int(d) for d in type_.shape[1:])
            return torch.full(shape, poison, dtype=dtype)
        tensor = torch.from_numpy(np.ascontiguousarray(array).copy())
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors hold the same bytes."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
