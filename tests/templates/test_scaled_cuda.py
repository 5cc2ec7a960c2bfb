"""Products of fp8 codes with a scale for 128 values of k whose kernel is in CUDA, between kernels
in Triton's interpreter: near the fp64 reference on tails of rows and columns, weights that meet,
sums in segments; a row alone has the bits that it has among others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import triton_run
from support.contract_graphs import linear, only_body
from support.kernel_case import Case, errors, make_case
from tilewright.codegen.emit.cuda_scaled import SCALED, refuses_scaled
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.emit.triton_contract import contractions
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph
from tilewright.targets.nvidia.hopper_contract import LINEAR
from tilewright.targets.registry import resolve

pytestmark = pytest.mark.cpu
TARGET = resolve("sm90")[0]


def spec_of(graph: Graph, *, segments: int = 1, split: int = 0, cores: int = 2) -> KernelSpec:
    body = only_body(graph)
    numerics = replace(derive("contract", body.graph, TARGET), segments=segments)
    assert refuses_scaled(body.graph, numerics, contractions(body.graph)) is None
    schedule = Schedule.of(bm=128, bn=256, bk=128, warps=4, stages=2, row_warps=4, split=split,
                           listed=0, stream=SCALED, cores=cores)  # fmt: skip
    return KernelSpec("contract", body.graph, "contract", numerics, schedule, body.buffers)


def run(spec: KernelSpec, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    assert "tw_scaled.cuh" in emit(spec, LINEAR).text
    return triton_run.run_spec(spec, LINEAR, case, folder)


def agrees(spec: KernelSpec, tokens: int, folder: Path) -> dict[str, torch.Tensor]:
    case = make_case(spec, {"tokens": tokens}, seed=2)
    got = run(spec, case, folder)
    for output, error in errors(case, got):
        rounded = got[output].dtype == torch.bfloat16
        assert error <= (2.0**-8 if rounded else 2e-5), (output, error)
    return got


@pytest.mark.slow
def test_more_rows_and_columns_than_a_block(tmp_path: Path) -> None:
    """Two blocks of rows, two of columns, five stages in a ring of two."""
    agrees(spec_of(linear([("fp8_128", 328)], 640)), 133, tmp_path)


def test_two_weights_meet_in_a_block(tmp_path: Path) -> None:
    """A third one beside them, of an odd number of panels."""
    weights = [("fp8_128", 136), ("fp8_128", 136), ("fp8_128", 72)]
    agrees(spec_of(linear(weights, 256, gated=True)), 9, tmp_path)


@pytest.mark.slow
def test_segments_are_added_by_another_kernel(tmp_path: Path) -> None:
    """Two segments of 256 of the 384 values of k."""
    agrees(spec_of(linear([("fp8_128", 72)] * 2, 384), segments=2, split=1), 70, tmp_path)


def test_a_row_is_its_own(tmp_path: Path) -> None:
    spec = spec_of(linear([("fp8_128", 72)], 128), cores=1)
    case = make_case(spec, {"tokens": 131}, seed=4)
    whole = run(spec, case, tmp_path)
    ((_, out),) = spec.body.outputs
    one = {n: t[129:130].clone() if t.shape[:1] == (131,) else t for n, t in case.arguments.items()}
    alone = run(spec, Case(one, {"tokens": 1}, {}), tmp_path)
    assert torch.equal(alone[out][0], whole[out][129])


@pytest.mark.parametrize(
    ("weights", "k", "why"),
    [([("fp8", 72)], 256, "products"), ([("fp8_128", 76)], 256, "parts")],
)  # fmt: skip
def test_what_it_does_not_take(weights: list[tuple[str, int]], k: int, why: str) -> None:
    body = only_body(linear(weights, k)).graph
    said = refuses_scaled(body, derive("contract", body, TARGET), contractions(body))
    assert said is not None and why in said
