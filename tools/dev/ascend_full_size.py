"""Runs every kernel of a published configuration at its real tile sizes on the functional model of
the Ascend 950, each once, for a few tokens of one request, on weights and states of zeros, with all
checks; and how far each memory is used. Values are the business of tests.

    python -m tilewright.tools.dev.ascend_full_size CONFIG [--part P] [--share 0/4] [--but CONFIG]
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tvm_ffi
import typer

from tilewright.codegen.arguments import argument_names, int_names, matrix_weights, needs_scratch
from tilewright.codegen.body import Body
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.compile import CompileJob
from tilewright.codegen.emit.ascendc_host import stored_as
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.pack import PACKINGS, pack_weight
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import GroupPlan, plan_groups
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph.dims import evaluate
from tilewright.runtime.devices.ascend950_model import Ascend950Model
from tilewright.tools.commands.job import Asked, make_job, open_model, resolve_asked

NORESERVE = 0x4000  # Linux; Python 3.11 has no name for it
TOKENS, POSITION, PAGES = 3, 700, 8  # tokens stand at the end of a context of that many
TYPES = {"kDLFloat32": torch.float32, "kDLBfloat16": torch.bfloat16, "kDLFloat16": torch.float16,
         "kDLInt32": torch.int32, "kDLUInt8": torch.uint8}  # fmt: skip


def job_of(config: str, part: str) -> CompileJob:
    """Return the job of a configuration on a part, for the model."""
    asked = Asked(model_config=config, target=f"ascend950:{part}+model", dtype="bfloat16")
    return make_job(open_model(asked), resolve_asked(asked), None)


def kernels_of(job: CompileJob) -> dict[str, tuple[KernelSpec, Body]]:
    """Return every kernel once, with the body it computes."""
    plans: list[GroupPlan] = list(
        plan_groups(lower(job.graph, job.flags).graph, job.target, job.config, job.choose)
    )
    found: dict[str, tuple[KernelSpec, Body]] = {}
    for plan in plans:
        for spec in plan.specs.values():
            found.setdefault(spec.symbol, (spec, plan.body))
    return found


def extents(spec: KernelSpec) -> dict[str, int]:
    """Few tokens of one request; pages for its context."""
    found = {}
    for dim in spec.body.dims:
        is_rows = dim.name in ("tokens", "logit_rows")
        wanted = TOKENS if is_rows else 1 if dim.name == "requests" else PAGES
        found[dim.name] = max(dim.lower, min(wanted, dim.upper))
    return found


def zeros(size: int) -> torch.Tensor:
    """Bytes of pages of their own; those that nobody writes take no memory, be it a table of
    100 GB."""
    pages = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.from_numpy(np.frombuffer(pages, np.uint8)[:size])


def operand(spec: KernelSpec, body: Body, name: str, dims: Mapping[str, int]) -> torch.Tensor:
    """Zeros of an argument's shape; positions at the end of a context, slots apart."""
    graph = spec.body
    if name in matrix_weights(graph):
        layout = PACKINGS["ascendc"].layout(graph.weight[name].type)
        return zeros(pack_weight(graph.weight[name], layout, None).num_bytes)  # type: ignore[arg-type]
    stored = stored_as(graph, name)
    shape = [evaluate(d, dims) for d in spec.stored_type(name).shape]
    dtype = TYPES[stored.code + str(stored.bits)]
    count = 1
    for extent in shape:
        count *= extent
    found = zeros(max(count, 1) * dtype.itemsize).view(dtype)[:count].view(shape)
    source = body.binding.get(name, name)
    if source == "positions":
        found.copy_(POSITION + torch.arange(len(found)))
    elif "slot" in source and dtype == torch.int32:
        found.copy_(torch.arange(count, dtype=torch.int32).view(shape))
    return found


def launch(
    module: Any, spec: KernelSpec, body: Body, template: KernelTemplate
) -> None:
    """Launch once; a fault is a ValueError."""
    dims = extents(spec)
    arguments = [operand(spec, body, name, dims) for name in argument_names(spec.body)]
    if needs_scratch(spec.kind):
        bounds = {d.name: dims.get(d.name, d.upper) for d in spec.body.dims}
        size = template.scratch_bytes(spec.body, spec.numerics, spec.schedule, bounds)
        arguments.append(zeros(size))
    module[spec.symbol](*arguments, *(dims[n] for n in int_names(spec.body)))


def new_kernels(config: str, part: str, known: list[str]) -> dict[str, tuple[KernelSpec, Body]]:
    """Return the kernels of a configuration that none of the known ones has in equal form: what a
    kernel computes, its numerics and its tiles decide its symbol."""
    found = kernels_of(job_of(config, part))
    for other in known:
        for symbol in kernels_of(job_of(other, part)):
            found.pop(symbol, None)
    return found


def report(job: CompileJob, chosen: list[tuple[KernelSpec, Body]]) -> Iterator[str]:
    """Yield a line for each kernel: seconds, modelled cycles, memories in bytes, or its faults."""
    templates = {t.name: t for t in job.target.kernels}
    sources = [emit(spec, templates[spec.template]) for spec, _ in chosen]
    cache = KernelCache(job.flags.cache, job.toolchain)
    built = cache.build(sources, jobs=job.jobs, progress=lambda *_: None)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        job.toolchain.link(built.objects, library)
        module, model = tvm_ffi.load_module(str(library)), Ascend950Model(library)
        for spec, body in chosen:
            yield one_kernel(module, model, spec, body, templates[spec.template])


def one_kernel(
    module: Any, model: Ascend950Model, spec: KernelSpec, body: Body, template: KernelTemplate
) -> str:
    """Launch a kernel; return its line."""
    model.configure()
    start = time.perf_counter()
    try:
        launch(module, spec, body, template)
        said = "clean"
    except ValueError as error:
        said = f"FAULT {error}"
    used: dict[str, int] = {}
    for record in model.facts():
        for memory, (_, end, _) in record["buffers"].items():
            used[memory] = max(used.get(memory, 0), end)
    cycles = sum(r["cycles"] for r in model.facts())
    where = " ".join(f"{memory} {end}" for memory, end in used.items())
    seconds = time.perf_counter() - start
    return f"{spec.symbol} {spec.template} {seconds:.1f} s, {cycles} cycles, {where}: {said}"


def main(
    config: Annotated[str, typer.Argument(help="A published configuration.")],
    part: Annotated[str, typer.Option(help="The part of the chip.")] = "950pr-32",
    share: Annotated[str, typer.Option(help="0/4: the first of four parts of them.")] = "0/1",
    but: Annotated[list[str] | None, typer.Option(
        help="Leave out what this configuration has in equal form."
    )] = None,
) -> None:  # fmt: skip
    """Run kernels; end with 1 if one has a fault."""
    first, _, count = share.partition("/")
    every = list(new_kernels(config, part, but or []).values())
    chosen, faults = every[int(first) :: int(count)], 0
    start = time.perf_counter()
    for line in report(job_of(config, part), chosen):
        print(line, flush=True)
        faults += "FAULT" in line
    seconds = time.perf_counter() - start
    print(f"{len(chosen)} of {len(every)} kernels, {faults} with faults, {seconds:.0f} s")
    raise typer.Exit(int(faults > 0))


if __name__ == "__main__":
    typer.run(main)
