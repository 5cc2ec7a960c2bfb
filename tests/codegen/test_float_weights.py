"""Weights of fp8 and fp4 through the pipeline: products of quantised rows, tables gathered by row,
stacks packed matrix by matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support.contractions import Contraction
from support.execute import run_artifact, run_reference
from support.tiny import QUANTISED, SETTINGS, Tiny, build, quick_target
from support.weights import RandomWeights
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pack import pack_weights, weight_record
from tilewright.codegen.pack_cpu import FORMATS, Unpacked, packed_bytes
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import first_candidate, plan_groups
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.types import BF16, F32, I32, ElementType, element_type

TARGET = quick_target((1, 8))
TABLE = element_type("fp8_e4m3[g=32,axis=1,scale=ue8m0]")
ROWS, K, N = 24, 96, 40


def quantised(stored: str, group: int) -> Graph:
    """Rows rounded to fp8 times a weight: one kernel."""
    b = GraphBuilder("quantised")
    x = b.input("x", F32, b.dim("rows", Role.BATCH, upper=ROWS), K)
    h = b.op("quantise", x, dtype=f"fp8_e4m3[g={group},axis=1,scale=ue8m0]")
    b.output("y", b.linear(h, b.weight("w", element_type(QUANTISED[stored]), N, K)))
    return b.build()


@pytest.mark.cpu
@pytest.mark.parametrize(("stored", "group"), [("fp8_128", 128), ("fp4", 32), ("fp4", 128)])
def test_rows_quantised_in_the_kernel_multiply_as_in_the_reference(
    stored: str, group: int, kernel_cache: Path
) -> None:
    graph = quantised(stored, group)
    kernel = Contraction(graph, TARGET, kernel_cache, rows=(1, ROWS), count=1)
    r = np.random.default_rng(0)
    x = (r.standard_normal((ROWS, K)) * np.exp2(r.integers(-8, 8, (ROWS, 1)))).astype(np.float32)
    want = run_reference(graph, {"x": torch.from_numpy(x)}, kernel.weights).outputs["y"].numpy()
    results = []
    for spec in kernel.specs:
        (y,) = kernel.run(spec, {"x": x}, {"rows": ROWS}).values()
        scale = np.abs(x).max(1, keepdims=True) + 1e-30
        np.testing.assert_allclose(y / scale, want / scale, atol=2e-5)
        results.append(y)
    assert all(np.array_equal(y, results[0]) for y in results)
    integer = kernel.specs[0].numerics.atom == "integer"
    assert integer == (stored == "fp4" and group % 32 == 0)


@pytest.mark.cpu
def test_quantised_rows_between_kernels_are_bf16(kernel_cache: Path) -> None:
    b = GraphBuilder("given")
    x = b.input("x", TABLE, b.dim("rows", Role.BATCH, upper=ROWS), K)
    b.output("y", b.linear(x, b.weight("w", element_type(QUANTISED["fp8"]), N, K)))
    graph = b.build()
    kernel = Contraction(graph, TARGET, kernel_cache, rows=(1,), count=1)
    values = torch.from_numpy(np.random.default_rng(1).integers(-8, 9, (5, K)) * np.float32(0.125))
    bits = values.bfloat16().view(torch.uint16).numpy()
    (y,) = kernel.run(kernel.specs[0], {"x": bits}, {"rows": 5}).values()
    want = run_reference(graph, {"x": values.float()}, kernel.weights).outputs["y"].numpy()
    np.testing.assert_allclose(y, want, atol=1e-5)


def table_graph() -> Graph:
    b = GraphBuilder("table")
    ids = b.input("ids", I32, b.dim("rows", Role.BATCH, upper=ROWS))
    b.output("y", b.op("embedding", ids, b.weight("table", TABLE, 50, 80)))
    return b.build()


@pytest.mark.cpu
def test_rows_of_a_table_are_gathered_exactly(tmp_path: Path, kernel_cache: Path) -> None:
    graph = table_graph()
    weights = RandomWeights(graph)
    build(Tiny(graph, weights, SETTINGS, {}), tmp_path / "a", kernel_cache, target=TARGET)
    ids = torch.tensor([0, 49, 3, 2, 17, 0], dtype=torch.int32)
    (result,) = run_artifact(tmp_path / "a", graph, [({"ids": ids}, {"rows": 6})])
    np.testing.assert_array_equal(result["y"], weights.tensors()["table"].numpy()[ids.numpy()])


def test_a_table_lies_as_rows_of_codes_and_scales() -> None:
    graph = lower(table_graph(), Flags()).graph
    plans = plan_groups(graph, TARGET, SETTINGS, first_candidate(TARGET))
    weights = RandomWeights(graph)
    (packed,) = pack_weights(graph, plans, weights)
    raw = weights.unpacked("table", TABLE)
    assert raw.codes is not None and raw.d is not None
    assert packed.layout == "scaled_rows" and packed.num_bytes == 50 * 83 == packed.data.size
    rows = packed.data.reshape(50, 83)
    np.testing.assert_array_equal(rows[:, :80], raw.codes)
    np.testing.assert_array_equal(rows[:, 80:], raw.d)
    assert len(list(packed.pieces())) == 2


class Counting(RandomWeights):
    """Says which matrices were asked for, in order."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.asked: list[str] = []

    def unpacked(self, name: str, dtype: ElementType) -> Unpacked:
        self.asked.append(name)
        return super().unpacked(name, dtype)


def test_a_stack_is_read_and_packed_matrix_by_matrix() -> None:
    b = GraphBuilder("stack")
    rows = b.dim("rows", Role.BATCH, upper=ROWS)
    x, ids = b.input("x", BF16, rows, 64), b.input("ids", I32, rows, 2)
    dtype = element_type(QUANTISED["fp4"])
    b.output("y", b.op("expert_linear", x, b.stack("w", dtype, ["a", "b", "c"], 20, 64), ids))
    graph = lower(b.build(), Flags()).graph
    plans = plan_groups(graph, TARGET, SETTINGS, first_candidate(TARGET))
    source = Counting(graph)
    (packed,) = pack_weights(graph, plans, source)
    assert source.asked == []
    pieces: Iterator[np.ndarray] = packed.pieces()  # type: ignore[type-arg]
    first = next(pieces)
    assert source.asked == ["a"] and first.size == packed_bytes("fp4", 20, 64)
    assert packed.num_bytes == 3 * first.size == packed.data.size
    record = weight_record(packed, 0)
    assert record.shape == (3, 20, 64) and record.format == QUANTISED["fp4"]


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [("fp8", "fp8", "factored"), ("fp4", "fp4", "factored"), ("fp8", "fp4", "dequantise"),
     ("fp8", "q4_1", "dequantise"), ("q4_1", "q4_1", "dequantise")],
)  # fmt: skip
def test_scales_of_float_codes_multiply_sums(first: str, second: str, order: str) -> None:
    b = GraphBuilder("two")
    x = b.input("x", F32, b.dim("rows", Role.BATCH, upper=ROWS), K)
    for name, stored in (("a", first), ("b", second)):
        b.output(name, b.linear(x, b.weight(f"w{name}", element_type(QUANTISED[stored]), N, K)))
    graph = lower(b.build(), Flags()).graph
    (plan,) = plan_groups(graph, TARGET, SETTINGS, first_candidate(TARGET))
    assert derive("contract", plan.body.graph, TARGET).scale_order == order
    assert {s.numerics.scale_order for s in plan.specs.values()} == {order}


@pytest.mark.parametrize("stored", ["fp8", "fp4", "bf16"])
@pytest.mark.parametrize("rows", [1, 4, 16, 512])
def test_routed_kernels_have_schedules_to_choose_from(stored: str, rows: int) -> None:
    b = GraphBuilder("experts")
    tokens = b.dim("rows", Role.BATCH, upper=512)
    x, ids = b.input("x", BF16, tokens, 64), b.input("ids", I32, tokens, 2)
    dtype = element_type(QUANTISED.get(stored, stored))
    b.output("y", b.op("expert_linear", x, b.stack("w", dtype, ["a", "b", "c"], 20, 64), ids))
    graph = lower(b.build(), Flags()).graph
    (plan,) = plan_groups(graph, TARGET, SETTINGS, first_candidate(TARGET))
    numerics = derive("contract", plan.body.graph, TARGET)
    found = plan.choice.template.schedules(plan.body.graph, numerics, rows)
    assert len(found) >= 8 and len(set(found)) == len(found)
    group = FORMATS[{"bf16": "bf16"}.get(stored, stored)].group
    assert all(s.values["k_block"] % group == 0 for s in found)
