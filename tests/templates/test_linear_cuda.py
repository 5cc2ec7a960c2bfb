"""Contractions of fp8 and fp4 codes with one matrix whose kernel is in CUDA, between kernels in
Triton's interpreter: near the fp64 reference, few rows and many, segments beside each other and
after each other the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import triton_run
from support.contract_graphs import groups, linear, only_body
from support.deepseek import v41_graph
from support.kernel_case import Case, distinct_bodies, errors, make_case
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph
from tilewright.targets.nvidia.hopper_contract import LINEAR
from tilewright.targets.registry import resolve

pytestmark = pytest.mark.cpu
TARGET = resolve("sm90")[0]
COMMON = {"bn": 64, "bk": 128, "warps": 4, "row_warps": 4, "listed": 0}
FEW = {**COMMON, "hopper": 1, "each": 1, "bm": 8, "stages": 3, "blocks": 2, "split": 1}
WIDE = {**COMMON, "hopper": 2, "each": 2, "bm": 32, "stages": 3, "blocks": 1, "split": 1}


def spec_of(graph: Graph, segments: int, schedule: dict[str, int]) -> KernelSpec:
    body = only_body(graph)
    numerics = replace(derive("contract", body.graph, TARGET), segments=segments)
    chosen = Schedule.of(**schedule)
    return KernelSpec("contract", body.graph, "contract", numerics, chosen, body.buffers)


def run(spec: KernelSpec, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    assert 'CUDA = r"""' in emit(spec, LINEAR).text
    return triton_run.run_spec(spec, LINEAR, case, folder)


def bits(spec: KernelSpec, arguments: dict[str, torch.Tensor]) -> list[bytes]:
    return [arguments[v].contiguous().view(torch.uint8).numpy().tobytes()
            for _, v in spec.body.outputs]  # fmt: skip


GRAPHS = {
    "gated": lambda: linear([("fp8", 72), ("fp8", 72)], 384, gated=True),
    "two sizes": lambda: linear([("fp8", 72), ("fp8", 200)], 384),
    "one": lambda: linear([("fp8", 136)], 384),
    "groups": lambda: groups("fp8", n=256, k=384, count=2),
}
SCHEDULES = (FEW, {**WIDE, "split": 0}, WIDE, {**WIDE, "each": 1, "blocks": 2})


def agree(graph: Graph, schedules: Sequence[dict[str, int]], tokens: int, folder: Path) -> None:
    """Near the reference, and one result over schedules."""
    found = []
    for schedule in schedules:
        spec = spec_of(graph, 2, schedule)
        case = make_case(spec, {"tokens": tokens}, seed=2)
        got = run(spec, case, folder)
        for output, error in errors(case, got):
            rounded = got[output].dtype == torch.bfloat16
            assert error <= (2.0**-8 if rounded else 2e-5), (output, error)
        found.append(bits(spec, got))
    assert all(found[0] == other for other in found)


def test_few_rows_and_many_agree(tmp_path: Path) -> None:
    agree(GRAPHS["gated"](), SCHEDULES[:2], 5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_every_schedule_agrees(name: str, tmp_path: Path) -> None:
    agree(GRAPHS[name](), SCHEDULES, 35, tmp_path)


@pytest.mark.slow
def test_a_segment_may_be_empty_and_a_row_is_its_own(tmp_path: Path) -> None:
    """Four segments of 256 of the 640 values of k."""
    spec = spec_of(linear([("fp8", 72)], 640), 4, FEW)
    case = make_case(spec, {"tokens": 11}, seed=2)
    whole = run(spec, case, tmp_path)
    ((_, out),) = spec.body.outputs
    one = {n: t[3:4].clone() if t.shape[:1] == (11,) else t for n, t in case.arguments.items()}
    alone = run(spec, Case(one, {"tokens": 1}, {}), tmp_path)
    assert torch.equal(alone[out][0], whole[out][3])


def test_rows_are_made_by_a_kernel_before(tmp_path: Path) -> None:
    """A norm and the coding of its rows, as in V4.1's queries."""
    graph = v41_graph("w", engram=(), q_lora_rank=128)
    (body,) = [b for name, _, b in distinct_bodies(graph) if name.endswith("wq_b")]
    numerics = derive("contract", body.graph, TARGET)
    first = LINEAR.schedules(body.graph, numerics, 1)[0]
    spec = KernelSpec("contract", body.graph, "contract", numerics, first, body.buffers)
    assert first.values["hopper"] == 1 and spec.body.nodes[0].op != "linear"
    case = make_case(spec, {"tokens": 5}, seed=3)
    for output, error in errors(case, run(spec, case, tmp_path)):
        assert error <= 2.0**-7, (output, error)
