"""Contractions of 4-bit and 8-bit integer codes for a machine with a GPU: odd shapes are checked
in every tile, and the layers of SmolLM2-135M are timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from device.cases_contract import DeviceCase, _facts
from support.contract_graphs import linear, only_body, residual
from support.kernel_case import make_case
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph

TOKENS = 150  # two tiles of rows, the second with a tail
ROWS_TIMED = (1, 8, 32, 64, 128, 512)

THREE = (200, 200, 72)
CHECKED = {
    "gated q4_1 k608": lambda: linear([("q4_1", n) for n in THREE], 608, gated=True),
    "segments q4_1 k2080": lambda: linear([("q4_1", 264)], 2080),
    "residual q4_1 k1536": lambda: residual(200, 1536, "q4_1"),
    "gated q8_0 k608": lambda: linear([("q8_0", n) for n in THREE], 608, gated=True),
    "residual q8_0 k1536": lambda: residual(200, 1536, "q8_0"),
}  # fmt: skip
TIMED = {
    "960 x 576": lambda: linear([("q4_1", 960)], 576),
    "576 x 576, residual": lambda: residual(576, 576, "q4_1"),
    "1536 + 1536 x 576, gated": lambda: linear([("q4_1", 1536), ("q4_1", 1536)], 576, gated=True),
    "576 x 1536, residual": lambda: residual(576, 1536, "q4_1"),
    "49152 x 576": lambda: linear([("q8_0", 49152)], 576),
}


def code_cases(target: Any) -> Iterator[DeviceCase]:
    """Every schedule of few rows and of many where values are checked, else those that lead."""
    for name, graph in CHECKED.items():
        specs = _specs(graph(), target, (1, 512), 99)
        yield DeviceCase("codes", name, specs, lambda s=specs[0]: make_case(  # type: ignore[misc]
            s, {"tokens": TOKENS}, seed=7))  # fmt: skip
    for name, graph in TIMED.items():
        specs = _specs(graph(), target, ROWS_TIMED, 3)
        yield DeviceCase("coded", name, specs, None, {"rows": ROWS_TIMED, **_facts(specs[0])})


def _specs(graph: Graph, target: Any, steps: tuple[int, ...], count: int) -> list[KernelSpec]:
    body = only_body(graph)
    template = next(t for t in target.kernels if t.name == "contract")
    numerics = derive("contract", body.graph, target)
    chosen = [s for rows in steps for s in template.schedules(body.graph, numerics, rows)[:count]]
    return [
        KernelSpec("contract", body.graph, template.name, numerics, s, body.buffers)
        for s in dict.fromkeys(chosen)
    ]
