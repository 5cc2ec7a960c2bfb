"""How many bytes of tensors a second the functional model of the Ascend 950 moves through an
elementwise row kernel, all checks on, on one core: bytes read and written over CPU time.

    python -m tilewright.tools.dev.ascend_speed [--rows 512] [--width 576] [--seconds 2]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import tvm_ffi
import typer

from tilewright.codegen.arguments import argument_names, int_names
from tilewright.codegen.body import extract
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.select import select
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.types import BF16, F32
from tilewright.targets.registry import resolve

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def elementwise(rows: int, width: int) -> Graph:
    """silu(x) times w, x fp32, w and the result bf16."""
    b = GraphBuilder("speed")
    tokens = b.dim("tokens", Role.BATCH, upper=rows)
    x, w = b.input("x", F32, tokens, width), b.input("w", BF16, tokens, width)
    b.output("y", b.cast(b.op("mul", b.op("silu", x), w), BF16))
    return b.build()


def kernel_of(graph: Graph, folder: Path) -> tuple[KernelSpec, Callable[..., object]]:
    """Build the one kernel of a graph for the model; return its spec and the function."""
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
    library = folder / "speed.so"
    toolchain.link(built.objects, library)
    return spec, tvm_ffi.load_module(str(library))[spec.symbol]


def main(
    rows: Annotated[int, typer.Option(help="Rows of a launch.")] = 512,
    width: Annotated[int, typer.Option(help="Elements of a row.")] = 576,
    seconds: Annotated[float, typer.Option(help="How long to launch.")] = 2.0,
) -> None:
    """Print megabytes a second of CPU time: best and median of the launches."""
    with tempfile.TemporaryDirectory() as folder:
        spec, function = kernel_of(elementwise(rows, width), Path(folder))
        body = spec.body
        given = [
            torch.randn(rows, width).to(TYPES[str(body.type_of(name).dtype)])
            for name in argument_names(body)
        ]
        moved, found = sum(t.numel() * t.element_size() for t in given), []
        ints = [rows for _ in int_names(body)]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.process_time()
            function(*given, *ints)
            found.append(time.process_time() - start)
    best, median = (moved / each / 1e6 for each in (min(found), statistics.median(found)))
    size = f"{len(found)} launches of {moved / 1e6:.1f} MB"
    print(f"{size}: best {best:.1f}, median {median:.1f} MB/s")


if __name__ == "__main__":
    typer.run(main)
