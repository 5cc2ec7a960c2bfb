"""How many bytes of tensors a second the functional model of the Ascend 950 moves with all checks
on: bytes over CPU time of one core, for one kernel of each kind.

    python -m tilewright.tools.dev.ascend_speed [--rows 512] [--seconds 2] [--only norm]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tvm_ffi
import typer

from tilewright.codegen.arguments import argument_names, int_names, matrix_weights, needs_scratch
from tilewright.codegen.body import Body, extract
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.emit.ascendc_host import stored_as
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.select import select
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.dims import evaluate
from tilewright.graph.types import BF16, F32, I32, element_type
from tilewright.runtime.devices.ascend950_model import Ascend950Model
from tilewright.targets.registry import resolve
from tilewright.tools.dev.ascend_full_size import TYPES

CODES = "fp8_e4m3[g=32,axis=1,scale=ue8m0]"
LATENT_ROWS = "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=64xbf16]"
POSITION, PAGES, PAGE_ROWS, CHOSEN = 200, 12, 32, 128  # of attention: where its tokens stand


def elementwise(rows: int) -> Graph:
    """silu(x) times w, x fp32, w and the result bf16."""
    b = GraphBuilder("elementwise")
    tokens = b.dim("tokens", Role.BATCH, upper=rows)
    x, w = b.input("x", F32, tokens, 576), b.input("w", BF16, tokens, 576)
    b.output("y", b.cast(b.op("mul", b.op("silu", x), w), BF16))
    return b.build()


def norm(rows: int) -> Graph:
    """An RMS norm of bf16 rows."""
    b = GraphBuilder("norm")
    x = b.cast(b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=rows), 1024), F32)
    b.output("y", b.cast(b.op("rms_norm", x, b.weight("w", F32, 1024), eps=1e-6), BF16))
    return b.build()


def quantise(rows: int) -> Graph:
    """bf16 rows to the values of fp8 codes with a scale for 32."""
    b = GraphBuilder("quantise")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=rows), 1024)
    b.output("y", b.op("quantise", x, dtype=CODES))
    return b.build()


def product(rows: int) -> Graph:
    """bf16 rows times a square bf16 weight."""
    b = GraphBuilder("product")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=rows), 576)
    b.output("y", b.cast(b.op("linear", x, b.weight("w", BF16, 576, 576)), BF16))
    return b.build()


def attention(rows: int) -> Graph:
    """Latent attention of 64 heads of 512 over a window of 128 packed rows and 128 chosen ones."""
    b = GraphBuilder("attention")
    tokens = b.dim("tokens", Role.BATCH, upper=rows)
    requests = b.dim("requests", Role.BATCH, upper=8)
    pages = b.dim("pages", Role.BATCH, upper=64)
    blocks = b.dim("blocks", Role.CONTEXT, upper=64)
    stored = element_type(LATENT_ROWS)
    window = b.state("window", stored, pages, PAGE_ROWS, 512)
    entries = b.state("entries", stored, pages, PAGE_ROWS, 512)
    positions, places = b.input("positions", I32, tokens), b.input("request_rows", I32, tokens)
    tables, sink = b.input("tables", I32, requests, blocks), b.weight("sink", F32, 64)
    q, chosen = b.input("q", BF16, tokens, 64, 512), b.input("chosen", I32, tokens, CHOSEN)
    operands = (q, window, positions, places, tables, sink, entries, tables, chosen)
    out = b.op("attend_selected", *operands, scale=0.05, window=128)
    b.output("y", b.cast(out, BF16))
    return b.build()


KINDS: Mapping[str, tuple[Callable[[int], Graph], int]] = {  # and one of how many rows it takes
    "elementwise": (elementwise, 1), "norm": (norm, 1), "quantise": (quantise, 1),
    "product": (product, 1), "attention": (attention, 64),
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One kernel, and the names that its arguments have in the graph."""

    spec: KernelSpec
    body: Body
    template: KernelTemplate
    function: Callable[..., object]
    model: Ascend950Model


def kernel_of(graph: Graph, folder: Path) -> Kernel:
    """Build the one kernel of a graph for the model."""
    target, toolchain = resolve("ascend950:950-4+model")
    flags = Flags.from_environment()
    fused = lower(graph, flags).graph
    (group,) = fused.groups
    body = extract(fused, group)
    template = select(group, body, target).template
    numerics = derive(group.kind, body.graph, target)
    schedule = template.schedules(body.graph, numerics, 1)[0]
    spec = KernelSpec(group.kind, body.graph, template.name, numerics, schedule, body.buffers)
    cache = KernelCache(flags.cache, toolchain)
    built = cache.build([emit(spec, template)], jobs=1, progress=lambda *_: None)
    library = folder / f"{graph.name}.so"
    toolchain.link(built.objects, library)
    function = tvm_ffi.load_module(str(library))[spec.symbol]
    return Kernel(spec, body, template, function, Ascend950Model(library))


def operand(kernel: Kernel, name: str, dims: Mapping[str, int]) -> torch.Tensor:
    """Random values; tokens of one request one after the other, pages in order."""
    graph = kernel.spec.body
    shape = [evaluate(d, dims) for d in kernel.spec.stored_type(name).shape]
    if name in matrix_weights(graph):
        return torch.randn(shape).bfloat16().view(torch.uint8).reshape(-1)
    stored = stored_as(graph, name)
    dtype = TYPES[stored.code + str(stored.bits)]
    source = kernel.body.binding.get(name, name)
    if dtype == torch.int32:
        counted = torch.arange(shape[-1], dtype=dtype) + (POSITION if source == "positions" else 0)
        return (counted if source != "request_rows" else counted * 0).expand(shape).contiguous()
    if dtype == torch.uint8:  # ordinary numbers, as codes, scales and bf16
        return torch.randint(0x30, 0x40, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


def arguments(kernel: Kernel, rows: int) -> list[Any]:
    """Return all that a launch takes."""
    spec = kernel.spec
    others = {"requests": 1, "pages": PAGES, "blocks": PAGES}
    dims = {d.name: others.get(d.name, rows) for d in spec.body.dims}
    given: list[Any] = [operand(kernel, name, dims) for name in argument_names(spec.body)]
    if needs_scratch(spec.kind):
        size = kernel.template.scratch_bytes(spec.body, spec.numerics, spec.schedule, dims)
        given.append(torch.zeros(size, dtype=torch.uint8))
    return [*given, *(dims[name] for name in int_names(spec.body))]


@dataclass(frozen=True)
class Speed:
    """What a launch moves, in bytes, and CPU seconds of launches."""

    memory: int  # from and to global memory
    paths: int  # all paths between memories
    seconds: tuple[float, ...]

    def line(self, name: str) -> str:
        """One row of the table."""
        median, best = statistics.median(self.seconds), min(self.seconds)
        rates = (self.memory / best, self.memory / median, self.paths / median)
        cells = [f"{rate / 1e6:8.1f}" for rate in rates]
        sizes = f"{self.memory / 1e6:7.2f} {self.paths / 1e6:7.2f}"
        return f"{name:12s} {len(self.seconds):8d} {sizes} {' '.join(cells)}"


HEADER = "kernel       launches  GM MB all MB  best GM median GM median all   (MB/s)"


def measure(kernel: Kernel, rows: int, seconds: float) -> Speed:
    """Launch for so long, at least once after one that is not counted."""
    given = arguments(kernel, rows)
    kernel.model.configure()
    kernel.function(*given)
    (facts,) = kernel.model.facts()
    moved: Mapping[str, int] = facts["bytes"]
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        start = time.process_time()
        kernel.function(*given)
        found.append(time.process_time() - start)
    memory = sum(size for path, size in moved.items() if "gm" in path)
    return Speed(memory, sum(moved.values()), tuple(found))


def main(
    rows: Annotated[int, typer.Option(help="Rows of a launch; attention takes fewer.")] = 512,
    seconds: Annotated[float, typer.Option(help="How long to launch each kernel.")] = 2.0,
    only: Annotated[str, typer.Option(help=f"One of {', '.join(KINDS)}.")] = "",
) -> None:
    """Print megabytes a second of CPU time for each kind of kernel."""
    if only and only not in KINDS:
        raise typer.BadParameter(f"--only '{only}': unknown: have {', '.join(KINDS)}")
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        for name in [only] if only else KINDS:
            graph, share = KINDS[name]
            taken = max(1, rows // share)
            speed = measure(kernel_of(graph(taken), Path(folder)), taken, seconds)
            print(speed.line(name), flush=True)


if __name__ == "__main__":
    typer.run(main)
