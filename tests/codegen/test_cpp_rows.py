"""Row kernels: programs that once went wrong, compiled and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.execute import random_inputs, run_artifact, run_reference
from support.tiny import SETTINGS, Tiny, build, quick_target
from support.weights import RandomWeights
from tilewright.codegen.emit.row_plan import RowPlanner
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.graph import Graph, GraphBuilder, Role, Value
from tilewright.graph.errors import LowerError
from tilewright.graph.types import BF16, F32

pytestmark = pytest.mark.cpu
Program = Callable[[GraphBuilder, Value], tuple[Value, ...]]


def sum_of_rotated(b: GraphBuilder, x: Value) -> tuple[Value, ...]:
    """The element reduced is the rotated one, with its sign."""
    return (b.op("reduce_max", b.op("rotate_pairs", x, pairing="half")),)


def both_pairings(b: GraphBuilder, x: Value) -> tuple[Value, ...]:
    turned = [b.op("rotate_pairs", x, pairing=p) for p in ("half", "interleaved")]
    return (turned[0] + turned[1],)


def rotated_products(b: GraphBuilder, x: Value) -> tuple[Value, ...]:
    """x * a + rotated(x) * b, where g++ 12 fuses the alternating sums unless products are kept."""
    turned = b.op("rotate_pairs", x * 3.0, pairing="interleaved")
    return (x * 3.0 - turned,)


def array_of_the_same_stage(b: GraphBuilder, x: Value) -> tuple[Value, ...]:
    """abs is kept for the slice, and read in the nest of the pairs before its own nest ran."""
    turned = b.op("rotate_pairs", x, pairing="half")
    absolute = b.op("abs", x)
    return turned + absolute, b.op("slice_last", absolute, start=1, stop=3)


def selected_and_read(b: GraphBuilder, x: Value) -> tuple[Value, ...]:
    top = b.op("top_k_values", x, k=2)
    return top * 2.0, top


def views_in_and_out(b: GraphBuilder, x: Value) -> tuple[Value, ...]:
    heads = b.op("split_heads", x, num_heads=2)
    tops = b.op("reduce_max", heads)
    return (b.op("merge_heads", b.op("expand_last", b.op("merge_heads", heads * tops))),)


def rounded_chain(b: GraphBuilder, x: Value) -> tuple[Value, ...]:
    return (b.cast(b.cast(x * 0.1, BF16) + x, BF16) * -0.0,)


PROGRAMS: tuple[Program, ...] = (
    sum_of_rotated, both_pairings, rotated_products, array_of_the_same_stage, selected_and_read,
    views_in_and_out, rounded_chain,
)  # fmt: skip
WIDTHS = (2, 4, 6, 16, 34)


def programs() -> Graph:
    """Every program at every width, in one graph."""
    b = GraphBuilder("programs")
    rows = b.dim("rows", Role.BATCH, upper=9)
    for program in PROGRAMS:
        for width in WIDTHS[1:] if program is array_of_the_same_stage else WIDTHS:
            name = f"{program.__name__}.{width}"
            x = b.input(f"{name}.x", F32, rows, width)
            for index, value in enumerate(program(b, x)):
                b.output(f"{name}.{index}", value)
    return b.build()


def test_programs_are_exact(tmp_path: Path, kernel_cache: Path) -> None:
    graph = programs()
    model = Tiny(graph, RandomWeights(graph), replace(SETTINGS, max_tokens_per_step=9), {})
    build(model, tmp_path / "m", kernel_cache, target=quick_target((9, 9)))
    steps = [(random_inputs(graph, {"rows": n}, seed=n), {"rows": n}) for n in (1, 4, 9)]
    for (inputs, _), result in zip(steps, run_artifact(tmp_path / "m", graph, steps), strict=True):
        expected = run_reference(graph, inputs, model.weights).outputs
        for name, want in expected.items():
            np.testing.assert_array_equal(result[name], want.numpy(), err_msg=name)
            assert np.array_equal(np.signbit(result[name]), torch.signbit(want).numpy()), name


def test_a_nest_walks_pairs_of_one_kind() -> None:
    graph = lower(programs(), Flags()).graph
    for group in graph.groups:
        rows = graph.type_of(group.nodes[0]).shape[0]
        plan = RowPlanner(graph, group.nodes, rows, frozenset()).plan()
        assert all(nest.pairing in ("", "half", "interleaved") for nest in plan.nests)
        assert all(plan.stage[s] <= nest.stage for nest in plan.nests for s in nest.sinks)


def test_a_row_too_long_for_the_stack_is_refused(tmp_path: Path, kernel_cache: Path) -> None:
    b = GraphBuilder("long")
    x = b.input("x", F32, b.dim("rows", Role.BATCH, upper=4), 1 << 20)
    b.output("y", b.op("softmax", b.op("sin", x)))
    b.output("z", b.op("reduce_max", b.op("cos", x)))
    graph = b.build()
    model = Tiny(graph, RandomWeights(graph), replace(SETTINGS, max_tokens_per_step=4), {})
    with pytest.raises(LowerError) as caught:
        build(model, tmp_path / "m", kernel_cache, target=quick_target((4, 4)))
    assert "arrays of one row are too large" in str(caught.value)
