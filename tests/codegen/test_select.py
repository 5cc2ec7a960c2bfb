"""Selection: the first template that accepts, and every refusal told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.tiny import quick_target
from tilewright.codegen.body import extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.codegen.select import select
from tilewright.graph import GraphBuilder, Role
from tilewright.graph.errors import TargetError
from tilewright.graph.types import F32, I32, element_type

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


def _latent(b: GraphBuilder) -> None:
    rows, near = b.dim("rows", Role.BATCH), b.dim("near", Role.CONTEXT)
    state = b.state("window", F32, b.dim("pages", Role.BATCH), 8, 12)
    step = [b.input(n, I32, rows) for n in ("positions", "requests")]
    tables = b.input("tables", I32, b.dim("count", Role.BATCH), near)
    q, sink = b.input("q", F32, rows, 2, 12), b.weight("sink", F32, 2)
    b.output("y", b.op("attend_window", q, state, *step, tables, sink, scale=1.0, window=4))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_three_axes, "no kernel accepts 'linear' of 'linear' on cpu: contract: activation has "
                      "rank 3, want 2"),
        (_computed, "no kernel accepts 'linear' of 'linear' on cpu: contract: second operand is "
                    "computed, want a weight"),
        (_split_group, "no kernel accepts 'linear' of 'linear' on cpu: contract: k = 40 is no "
                       "multiple of the group of 32"),
        (_nvfp4, "no kernel accepts 'linear' of 'linear' on cpu: contract: weight format "
                 "fp4_e2m1[g=16,axis=1,scale=fp8_e4m3] has no packed layout"),
        (_odd_width, "no kernel accepts 'attend' of 'attend' on cpu: attend: head width 12 is no "
                     "multiple of 8; latent: 'attend' has keys and values of its own"),
        (_latent, "no kernel accepts 'attend_window' of 'attend_window' on cpu: attend: "
                  "'attend_window' reads rows that are keys and values at once; latent: width 12 "
                  "is no multiple of 8"),
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
