"""Builds kernels of the Ascend target for the functional model and runs them on cases."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from support.kernel_case import Case
from tilewright.codegen.arguments import argument_names, int_names, matrix_weights, needs_scratch
from tilewright.codegen.body import Body
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.numerics import derive
from tilewright.codegen.select import select
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate, Target, Toolchain
from tilewright.graph import Group
from tilewright.runtime.devices.ascend950_model import Ascend950Model

PRINTED = Path(__file__).parent.parent / "golden" / "targets" / "printed"


def printing_folder(cache: Path) -> Path:
    """Where toolchains of tests keep what TileLang prints, begun with the golden files: printing
    takes seconds for each kernel. Files go by content, so what changed is printed again."""
    folder = cache / "ascendc"
    folder.mkdir(parents=True, exist_ok=True)
    for golden in PRINTED.glob("*.asc"):
        if not (folder / golden.name).exists():
            shutil.copy(golden, folder / golden.name)
    return folder


@dataclass(frozen=True)
class Built:
    """Kernels in one library on the model."""

    specs: Mapping[str, KernelSpec]
    templates: Mapping[str, KernelTemplate]
    module: Any
    model: Ascend950Model

    def run(self, name: str, case: Case, *, adversarial: bool = False) -> dict[str, torch.Tensor]:
        """Launch a kernel on fresh copies; return all its tensors. A fault is a ValueError."""
        spec = self.specs[name]
        self.model.configure(adversarial=adversarial)
        given = case.fresh()
        for weight in matrix_weights(spec.body):
            given[weight] = given[weight].bfloat16().contiguous().view(-1).view(torch.uint8)
        return self.launch(name, given, case.dims)

    def launch(
        self, name: str, given: dict[str, torch.Tensor], dims: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Launch a kernel on tensors as they lie in memory, aligned copies of which it returns."""
        spec = self.specs[name]
        given = {key: aligned(tensor) for key, tensor in given.items()}
        arguments = [given[n] for n in argument_names(spec.body)]
        if needs_scratch(spec.kind):
            template = self.templates[spec.template]
            bounds = {d.name: dims.get(d.name, d.upper) for d in spec.body.dims}
            size = template.scratch_bytes(spec.body, spec.numerics, spec.schedule, bounds)
            arguments.append(aligned(torch.full((size,), 255, dtype=torch.uint8)))
        ints = [dims[n] for n in int_names(spec.body)]
        self.module[spec.symbol](*arguments, *ints)
        return given


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where kernels may read it: at a multiple of 64 bytes."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.empty(size + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    copy = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def specs_of(bodies: Sequence[tuple[str, str, Body]], target: Target) -> dict[str, KernelSpec]:
    """Return the spec of every body: the target's template, numerics and schedule."""
    found = {}
    for name, kind, body in bodies:
        template = select(Group(name, kind, ()), body, target).template
        numerics = derive(kind, body.graph, target)
        schedule = template.schedules(body.graph, numerics, 1)[0]
        found[name] = KernelSpec(kind, body.graph, template.name, numerics, schedule, body.buffers)
    return found


def build(
    specs: Mapping[str, KernelSpec], target: Target, toolchain: Toolchain, cache: Path, work: Path
) -> Built:
    """Compile and load kernels; objects are kept in `cache`."""
    templates = {t.name: t for t in target.kernels}
    sources = {s.symbol: emit(s, templates[s.template]) for s in specs.values()}
    built = KernelCache(cache, toolchain).build(
        list(sources.values()), jobs=2, progress=lambda stage, done, total: None
    )
    library = work / "kernels.so"
    toolchain.link(built.objects, library)
    module = tvm_ffi.load_module(str(library))
    return Built(specs, templates, module, Ascend950Model(library))
