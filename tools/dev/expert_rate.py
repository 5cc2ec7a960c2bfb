"""Measure products with chosen experts against what this machine reads, in one run.

python -m tilewright.tools.dev.expert_rate --format fp4 --tokens 1
"""

from __future__ import annotations

import argparse

from tilewright.codegen.body import Body, extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import Bucket
from tilewright.codegen.select import select
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.types import BF16, I32, element_type
from tilewright.targets.registry import resolve
from tilewright.tools.bench_machine import MachineProbe
from tilewright.tools.measure import CpuMeasure

FORMATS = {
    "fp4": "fp4_e2m1[g=32,axis=1,scale=ue8m0]",
    "fp8": "fp8_e4m3[block=128x128,scale=ue8m0]",
    "bf16": "bf16",
}
EXPERTS, SLOTS = 24, 6  # what one step reads is beyond the caches, like its experts' copies


def expert_product(stored: str, n: int, k: int) -> Graph:
    """One product with the chosen experts of every token."""
    b = GraphBuilder("expert_rate")
    tokens = b.dim("tokens", Role.BATCH, upper=512)
    x, ids = b.input("x", BF16, tokens, k), b.input("ids", I32, tokens, SLOTS)
    parts = [f"w.{e}" for e in range(EXPERTS)]
    b.output("y", b.op("expert_linear", x, b.stack("w", element_type(stored), parts, n, k), ids))
    return b.build()


def candidates(graph: Graph, tokens: int, count: int) -> tuple[Body, list[KernelSpec]]:
    """The kernel's first schedules for so many tokens."""
    target, _ = resolve("cpu")
    lowered = lower(graph, Flags()).graph
    (group,) = lowered.groups
    body = extract(lowered, group)
    template = select(group, body, target).template
    numerics = derive("contract", body.graph, target)
    schedules = template.schedules(body.graph, numerics, tokens)[:count]
    return body, [
        KernelSpec("contract", body.graph, template.name, numerics, s, body.buffers)
        for s in schedules
    ]


def main() -> None:
    """Print every schedule's time, GB/s of weights with the share of the read loop, GFLOP/s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=FORMATS, default="fp4")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--schedules", type=int, default=4)
    parser.add_argument("--shape", default="2048x4096", help="n x k of one expert")
    given = parser.parse_args()
    n, k = (int(part) for part in given.shape.split("x"))
    body, specs = candidates(
        expert_product(FORMATS[given.format], n, k), given.tokens, given.schedules
    )
    target, toolchain = resolve("cpu")
    probe = MachineProbe("cpu", Flags(), threads=given.threads)
    measure = CpuMeasure(
        target, toolchain, Flags().cache.expanduser(), num_threads=given.threads
    )
    seconds = measure(specs, body, Bucket("bench", {"tokens": given.tokens}))
    read = max(probe.read_bandwidth() for _ in range(3))
    _report(given.tokens, n, k, element_bits(given.format), specs, list(seconds), read)


def element_bits(name: str) -> float:
    """Bits an element takes as it is packed, scales included."""
    return {"fp4": 4.25, "fp8": 8.25, "bf16": 16.0}[name]


def _report(
    tokens: int, n: int, k: int, bits: float, specs: list[KernelSpec], seconds: list[float],
    read: float,
) -> None:  # fmt: skip
    used = min(EXPERTS, tokens * SLOTS) * n * k * bits / 8
    print(f"read loop {read / 1e9:.1f} GB/s, weights of a step {used / 1e6:.1f} MB")
    for spec, time in sorted(zip(specs, seconds, strict=True), key=lambda pair: pair[1]):
        rate, flops = used / time, 2 * tokens * SLOTS * n * k / time
        print(
            f"{time * 1e3:9.3f} ms {rate / 1e9:6.2f} GB/s ({rate / read:4.0%}) "
            f"{flops / 1e9:7.1f} GFLOP/s  {spec.schedule}"
        )


if __name__ == "__main__":
    main()
