"""Selection: the first template that accepts, every refusal told, every op covered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from support.tiny import quick_target
from tilewright.codegen.body import extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.codegen.select import coverage, select
from tilewright.graph import GraphBuilder, Role
from tilewright.graph.errors import TargetError
from tilewright.graph.ops import OPS, Kind
from tilewright.graph.types import F32, I32, element_type
from tilewright.targets.cpu.target import VARIANTS

TARGET = quick_target()


def _three_axes(b: GraphBuilder) -> None:
    x = b.input("x", F32, b.dim("rows", Role.BATCH), 2, 32)
    b.output("y", b.linear(x, b.weight("w", F32, 8, 32)))


def _computed(b: GraphBuilder) -> None:
    x, w = b.input("x", F32, b.dim("rows", Role.BATCH), 32), b.input("w", F32, 8, 32)
    b.output("y", b.linear(x, w))


def _split_group(b: GraphBuilder) -> None:
    x = b.input("x", F32, b.dim("rows", Role.BATCH), 40)
    w = b.weight("w", element_type("q4_1[g=32,axis=1,scale=f16]"), 8, 40)
    b.output("y", b.linear(x, w))


def _nvfp4(b: GraphBuilder) -> None:
    x = b.input("x", F32, b.dim("rows", Role.BATCH), 128)
    w = b.weight("w", element_type("fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]"), 128, 128)
    b.output("y", b.linear(x, w))


def _odd_width(b: GraphBuilder) -> None:
    rows, blocks = b.dim("rows", Role.BATCH), b.dim("blocks", Role.BATCH)
    k, v = b.state("k", F32, blocks, 1, 8, 12), b.state("v", F32, blocks, 1, 8, 12)
    q, positions = b.input("q", F32, rows, 1, 12), b.input("positions", I32, rows)
    requests = b.input("requests", I32, rows)
    tables = b.input("tables", I32, b.dim("count", Role.BATCH), b.dim("chain", Role.CONTEXT))
    b.output("y", b.op("attend", q, k, v, positions, requests, tables, scale=1.0))


_OTHERS = "latent: takes attend groups; select: takes select groups; row: takes row groups"
_LINEAR = "no kernel accepts 'linear' of 'linear' on cpu: contract: "
_REST = f"; attend: takes attend groups; {_OTHERS}"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_three_axes, f"{_LINEAR}activation has rank 3, want 2{_REST}"),
        (_computed, f"{_LINEAR}second operand is computed, want a weight{_REST}"),
        (_split_group, f"{_LINEAR}k = 40 is no multiple of the group of 32{_REST}"),
        (_nvfp4, f"{_LINEAR}weight format fp4_e2m1[g=16,axis=1,scale=fp8_e4m3] has no packed "
                 f"layout{_REST}"),
        (_odd_width, "no kernel accepts 'attend' of 'attend' on cpu: contract: takes contract "
                     "groups; attend: head width 12 is no multiple of 8; latent: 'attend' has keys "
                     "and values of its own; select: takes select groups; row: takes row groups"),
    ],
)  # fmt: skip
def test_refusals_are_told(build: Callable[[GraphBuilder], None], message: str) -> None:
    b = GraphBuilder("refused")
    build(b)
    graph = lower(b.build(), Flags()).graph
    group = graph.groups[0]
    with pytest.raises(TargetError) as caught:
        select(group, extract(graph, group), TARGET)
    assert str(caught.value) == message


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_op_is_covered(variant: str) -> None:
    table = coverage(VARIANTS[variant])
    assert table.keys() == OPS.keys()
    assert "missing" not in table.values()


def test_a_target_without_attention_lacks_its_ops() -> None:
    target = replace(TARGET, kernels=tuple(k for k in TARGET.kernels if k.kind != "attend"))
    lacking = [op for op, how in coverage(target).items() if how == "missing"]
    assert lacking == sorted(n for n, op in OPS.items() if op.kind is Kind.ATTEND)
