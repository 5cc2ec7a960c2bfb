"""Contractions for a machine with a GPU: fp8 and fp4 weights, experts, groups. Small odd shapes are
checked, the shapes of V4.1's layers are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from support.contract_graphs import experts, groups, linear, only_body
from support.kernel_case import Case, make_case
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph

TOKENS = 70
ROWS_TIMED = (1, 8, 32, 128, 512, 4096)
HIDDEN, EXPERTS, SLOTS, WIDTH = 5120, 384, 6, 2304  # V4.1-Flash


@dataclass(frozen=True)
class DeviceCase:
    """Schedules of one kernel, and what the other side must know: `case` gives operands and
    expected values, None where it is timed; `facts` go into its record as they are."""

    model: str
    name: str
    specs: list[KernelSpec]
    case: Callable[[], Case] | None
    facts: Mapping[str, Any] = field(default_factory=dict)


def contract_cases(target: Any, count: int = 16) -> Iterator[DeviceCase]:
    """All of them; `count` schedules of each that is checked, half as many of one that is timed."""
    for name, graph in _checked().items():
        specs = _specs(graph, target, count)
        yield DeviceCase("contract", name, specs, lambda specs=specs: _case(specs[0]))  # type: ignore[misc]
    for name, graph in _timed().items():
        specs = _specs(graph, target, count // 2)
        yield DeviceCase("V4.1", name, specs, None, {"rows": ROWS_TIMED, **_facts(specs[0])})


def _checked() -> dict[str, Graph]:
    found = {
        f"linear {stored} k{k}": linear([(stored, 200), (stored, 200), (stored, 72)], k, gated=True)
        for stored, k in (("fp8", 384), ("fp8", 2080), ("fp8", 2304), ("fp8_128", 2176),
                          ("fp4", 2336), ("bf16", 2100), ("q4_1", 2080), ("q8_0", 2048))
    }  # fmt: skip
    mixed = [("fp8", 40), ("bf16", 24), ("fp4", 200)]
    found["linear mixed"] = linear(mixed, 2080)
    for stored, k, shared, gated in (
        ("fp4", 2336, True, True), ("fp4", 160, False, False), ("fp4", 256, True, True),
        ("fp4", 384, False, False), ("fp8", 2080, True, False),
        ("bf16", 96, False, False), ("f32", 96, True, False),
    ):  # fmt: skip
        found[f"experts {stored} k{k}"] = experts(
            stored, n=136, k=k, shared=shared, gated=gated, count=11, slots=3
        )
    for stored, k in (("fp8", 2080), ("bf16", 96), ("fp4", 288)):
        found[f"groups {stored} k{k}"] = groups(stored, n=40, k=k, count=3)
    return found


def _timed() -> dict[str, Graph]:
    return {
        "wq_a, wkv": linear([("fp8", 1280), ("fp8", 512)], HIDDEN),
        "wq_b": linear([("fp8", 32768)], 1280),
        "wo_a": groups("fp8", n=1024, k=4096, count=8),
        "wo_b": linear([("fp8", HIDDEN)], 8192),
        "shared w1, w3": linear([("fp8", WIDTH), ("fp8", WIDTH)], HIDDEN, gated=True),
        "shared w2": linear([("fp8", HIDDEN)], WIDTH),
        "engram": linear([("fp8", 25600)], 6144),
        "7168 x 4096": linear([("fp8", 7168)], 4096),
        "7168 x 4096, scales of 128": linear([("fp8_128", 7168)], 4096),
        "4096 x 4096": linear([("bf16", 4096)], 4096),
        "gate": linear([("bf16", EXPERTS)], HIDDEN),
        "experts w1, w3": experts(
            "fp4", n=WIDTH, k=HIDDEN, shared=True, gated=True, count=EXPERTS, slots=SLOTS
        ),
        "experts w2": experts(
            "fp4", n=HIDDEN, k=WIDTH, shared=False, gated=False, count=EXPERTS, slots=SLOTS
        ),
    }


def _specs(graph: Graph, target: Any, count: int) -> list[KernelSpec]:
    """Schedules for few rows and for many in turn, those that come first and some of the rest."""
    body = only_body(graph)
    template = next(t for t in target.kernels if t.name == "contract")
    reason = template.accepts(body.graph)
    assert reason is None, reason
    numerics = derive("contract", body.graph, target)
    lists = []
    for rows in (512, 1):
        found = template.schedules(body.graph, numerics, rows)
        first, rest = found[: count // 4], found[count // 4 :]
        step = max(1, len(rest) // max(1, count // 4))
        lists.append([*first, *rest[::step][: count // 4]])
    chosen = [s for pair in zip_longest(*lists) for s in pair if s is not None]
    return [
        KernelSpec("contract", body.graph, template.name, numerics, s, body.buffers)
        for s in dict.fromkeys(chosen)
    ]


def _ids_of(spec: KernelSpec) -> tuple[str, int] | None:
    """The input of ids and the number of experts."""
    first = next(n for n in spec.body.nodes if n.op.endswith("linear"))
    if first.op != "expert_linear":
        return None
    return first.inputs[2], int(spec.body.type_of(first.inputs[1]).shape[0])


def _case(spec: KernelSpec) -> Case:
    """Ids name some experts often, one never, and now and then none: what that gives is NaN."""
    dims, found = {"tokens": TOKENS}, _ids_of(spec)
    if found is None:
        return make_case(spec, dims, seed=7)
    name, count = found
    r = torch.Generator().manual_seed(7)
    slots = int(spec.body.type_of(name).shape[1])
    ids = (torch.rand(TOKENS, slots, generator=r) ** 2 * (count - 1)).int()
    unknown = torch.rand(TOKENS, slots, generator=r) < 0.05
    case = make_case(spec, dims, seed=7, given={name: ids})
    expected = {n: t.where(~unknown[..., None], torch.nan) for n, t in case.expected.items()}
    odd = torch.where(torch.arange(TOKENS)[:, None] % 2 == 0, -1, count).int()
    return Case({**case.arguments, name: torch.where(unknown, odd, ids)}, case.dims, expected)


def _facts(spec: KernelSpec) -> dict[str, Any]:
    """Bytes of weights and operations a row, for rates; ids below the number of experts."""
    body, found = spec.body, _ids_of(spec)
    anchors = [n for n in body.nodes if n.op.endswith("linear")]
    flops = sum(
        2 * int(body.type_of(n.inputs[0]).shape[-1]) * _columns(spec, n.name) for n in anchors
    )
    facts: dict[str, Any] = {"flops_per_row": flops, "weights": [w.name for w in body.weights]}
    if found is not None:
        facts["ids"] = {found[0]: found[1]}
    elif all(n.op == "linear" for n in anchors):
        k = int(body.type_of(anchors[0].inputs[0]).shape[-1])
        facts["peer"] = (sum(_columns(spec, n.name) for n in anchors), k)
    return facts


def _columns(spec: KernelSpec, name: str) -> int:
    total = 1
    for extent in spec.body.node[name].type.shape[1:]:
        total *= int(extent)
    return total
