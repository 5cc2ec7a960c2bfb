"""Contractions of bf16 for a machine with a GPU: programs in TileLang among Triton's schedules.
Odd shapes are checked, layers of models are timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from device.cases_contract import DeviceCase, _facts
from support.contract_graphs import linear, only_body, residual
from support.kernel_case import make_case
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph

TOKENS = 150  # two tiles of rows, the second with a tail
ROWS_TIMED = (1, 64, 512, 4096)

CHECKED = {
    "gated k2104": lambda: linear([("bf16", 200), ("bf16", 200), ("bf16", 72)], 2104, gated=True),
    "segments k5120": lambda: linear([("bf16", 384)], 5120),
    "one segment k584": lambda: linear([("bf16", 264), ("bf16", 264)], 584, gated=True),
    "residual k520": lambda: residual(200, 520),
    "wide k328": lambda: linear([("bf16", 4104)], 328),
}
TIMED = {
    "4096 x 4096": lambda: linear([("bf16", 4096)], 4096),
    "4096 x 4096, rounded": lambda: residual(4096, 4096),
    "576 x 576, residual": lambda: residual(576, 576),
    "1536 + 1536 x 576, gated": lambda: linear([("bf16", 1536), ("bf16", 1536)], 576, gated=True),
    "576 x 1536, residual": lambda: residual(576, 1536),
    "gate 384 x 5120": lambda: linear([("bf16", 384)], 5120),
    "1024 x 5120": lambda: linear([("bf16", 1024)], 5120),
    "logits 32320 x 5120": lambda: linear([("bf16", 32320)], 5120),
}


def tile_cases(target: Any) -> Iterator[DeviceCase]:
    """Every program of few rows and of many, and the first of Triton's."""
    for name, graph in CHECKED.items():
        specs = _specs(graph(), target, (1, 64, 512), tiles=7, others=1)
        yield DeviceCase("tiles", name, specs, lambda s=specs[0]: make_case(  # type: ignore[misc]
            s, {"tokens": TOKENS}, seed=7))  # fmt: skip
    for name, graph in TIMED.items():
        specs = _specs(graph(), target, ROWS_TIMED, tiles=2, others=1)
        yield DeviceCase("tiled", name, specs, None, {"rows": ROWS_TIMED, **_facts(specs[0])})


def _specs(
    graph: Graph, target: Any, steps: tuple[int, ...], *, tiles: int, others: int
) -> list[KernelSpec]:
    body = only_body(graph)
    template = next(t for t in target.kernels if t.name == "contract")
    numerics = derive("contract", body.graph, target)
    chosen: list[Schedule] = []
    for rows in steps:
        found = template.schedules(body.graph, numerics, rows)
        mine = [s for s in found if s.values.get("tilelang")]
        chosen += [s for s in found if s not in mine][:others] + mine[:tiles]
    return [
        KernelSpec("contract", body.graph, template.name, numerics, s, body.buffers)
        for s in dict.fromkeys(chosen)
    ]
