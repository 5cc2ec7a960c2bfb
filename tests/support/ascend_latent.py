"""Latent attention and selections as kernels for the functional model of the Ascend target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.ascend_rows import TARGET
from support.ascend_run import Built, build, printing_folder, specs_of
from support.kernel_case import distinct_bodies
from support.latent_cases import Problem, Step, operands_of
from tilewright.codegen.body import Body
from tilewright.codegen.emit.shapes import constant
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.types import BF16
from tilewright.targets.ascend950.toolchain import AscendToolchain

Array = NDArray[Any]


def graph_of(p: Problem) -> Graph:
    """The attention of a problem on queries as they come, twice its result as bf16."""
    b = GraphBuilder("latent")
    tokens, requests = (b.dim(n, Role.BATCH, upper=512) for n in ("tokens", "requests"))
    q = b.input("q", BF16, tokens, p.heads, p.width)
    operands = operands_of(b, p, q, tokens, requests)
    b.output("out", b.cast(b.op(p.op, *operands, **p.attrs) * 2.0, BF16))
    return b.build()


def halved(step: Step) -> dict[str, Array]:
    """The operands of a step, with the queries that `expected` takes."""
    q = torch.from_numpy(step.values["q"] * 0.5).bfloat16()
    return {**step.arrays, "q": q.view(torch.uint16).numpy()}


@dataclass(frozen=True)
class PagedKernels:
    """Kernels of one kind for several problems in one library."""

    built: Built
    bodies: Mapping[str, Body]

    @classmethod
    def of(
        cls, graphs: Mapping[str, Graph], kind: str, cache: Path, work: Path
    ) -> PagedKernels:
        bodies = {
            name: next(b for _, k, b in distinct_bodies(graph) if k == kind)
            for name, graph in graphs.items()
        }
        toolchain = AscendToolchain(TARGET, folder=printing_folder(cache))
        specs = specs_of([(name, kind, b) for name, b in bodies.items()], TARGET)
        return cls(build(specs, TARGET, toolchain, cache, work), bodies)

    def run(self, name: str, arrays: Mapping[str, Array], dims: Mapping[str, int]) -> torch.Tensor:
        """Return the results, poisoned before; a fault of the model is a ValueError."""
        body, given = self.bodies[name], {}
        for value, source in body.binding.items():
            if source in arrays:
                held = torch.from_numpy(np.ascontiguousarray(arrays[source]))
                given[value] = held.view(torch.bfloat16) if held.dtype == torch.uint16 else held
        ((_, out),) = body.graph.outputs
        made = body.graph.type_of(out)
        shape = [dims["tokens"], *(constant(d) for d in made.shape[1:])]
        if str(made.dtype) == "i32":
            given[out] = torch.full(shape, -9, dtype=torch.int32)
        else:
            given[out] = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        return self.built.launch(name, given, dims)[out]
