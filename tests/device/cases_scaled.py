"""Products of fp8 codes with a scale for 128 values of k, for a machine with a GPU: the kernel in
CUDA among the schedules in Gluon. Odd shapes are checked, large ones are timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from device.cases_contract import DeviceCase, _facts
from support.contract_graphs import linear, only_body, stored_type
from support.kernel_case import make_case
from tilewright.codegen.emit.cuda_scaled import SCALED
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.types import BF16, F32

TOKENS = 331  # three blocks of rows, the last with a tail
ROWS_TIMED = (64, 512, 4096, 8192)


def rounded(n: int, k: int, *, residual: bool = False) -> Graph:
    """A product that is rounded to bf16; or scaled by columns and added to rows before."""
    b = GraphBuilder("rounded")
    tokens = b.dim("tokens", Role.BATCH, upper=8192)
    x = b.input("x", stored_type("fp8_e4m3[g=128,axis=1,scale=ue8m0]"), tokens, k)
    found = b.linear(x, b.weight("w", stored_type("fp8_128"), n, k))
    if residual:
        found = b.cast(found, BF16) * b.weight("scale", F32, n) + b.input("rest", BF16, tokens, n)
    b.output("y", b.cast(found, BF16))
    return b.build()


CHECKED = {
    "gated k1152": lambda: linear([("fp8_128", 200)] * 2 + [("fp8_128", 72)], 1152, gated=True),
    "two sizes k640": lambda: linear([("fp8_128", 328), ("fp8_128", 600)], 640),
    "residual k384": lambda: rounded(456, 384, residual=True),
    "segments k2176": lambda: linear([("fp8_128", 328)], 2176),
}
TIMED = {
    "7168 x 4096": lambda: linear([("fp8_128", 7168)], 4096),
    "7168 x 4096, rounded": lambda: rounded(7168, 4096),
    "4096 x 7168, rounded": lambda: rounded(4096, 7168),
    "4096 x 4096, rounded": lambda: rounded(4096, 4096),
    "2048 + 2048 x 4096, gated": lambda: linear([("fp8_128", 2048)] * 2, 4096, gated=True),
}


def scaled_cases(target: Any) -> Iterator[DeviceCase]:
    """Every schedule of many rows in CUDA, and the first of the others."""
    for name, graph in CHECKED.items():
        specs = _specs(graph(), target, others=3)
        yield DeviceCase("scaled", name, specs, lambda s=specs[0]: make_case(  # type: ignore[misc]
            s, {"tokens": TOKENS}, seed=7))  # fmt: skip
    for name, graph in TIMED.items():
        specs = _specs(graph(), target, others=1)
        facts = {"rows": ROWS_TIMED, "bounds": {"tokens": 8192}, **_facts(specs[0])}
        yield DeviceCase("scaled timed", name, specs, None, facts)


def _specs(graph: Graph, target: Any, *, others: int) -> list[KernelSpec]:
    body = only_body(graph)
    template = next(t for t in target.kernels if t.name == "contract")
    numerics = derive("contract", body.graph, target)
    many, few = (template.schedules(body.graph, numerics, rows) for rows in (4096, 1))
    chosen: list[Schedule] = [s for s in many if s.values.get("stream") == SCALED]
    chosen += [s for s in many if s not in chosen][:others] + list(few[:others])
    return [
        KernelSpec("contract", body.graph, template.name, numerics, s, body.buffers)
        for s in dict.fromkeys(chosen)
    ]
