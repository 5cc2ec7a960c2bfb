"""Contractions of codes for Hopper's cores, on threads of this machine: near the fp64 reference,
the same bits for few rows and for many, in lists and without, a row alone as among others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.contract_graphs import experts, linear, only_body
from support.hopper_run import HopperRun
from support.kernel_case import Case, errors, make_case
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph
from tilewright.targets.nvidia.hopper_contract import CONTRACT_HOPPER
from tilewright.targets.registry import resolve

pytestmark = pytest.mark.cpu
COUNT, SLOTS = 5, 3
TARGET = resolve("sm90")[0]
SCHEDULES = {
    "led": Schedule.of(bm=8, stages=3, blocks=2, wide=0, each=1, listed=0),
    "listed": Schedule.of(bm=16, stages=2, blocks=2, wide=0, each=1, listed=1),
    "wide": Schedule.of(bm=64, stages=3, blocks=1, wide=4, each=1, listed=1),
    "two tiles each": Schedule.of(bm=80, stages=2, blocks=1, wide=2, each=2, listed=1),
}


def graph(*, gated: bool, n: int = 72, k: int = 256) -> Graph:
    return experts("fp4", n=n, k=k, shared=gated, gated=gated, count=COUNT, slots=SLOTS)


def run_of(built: Graph, schedule: Schedule, folder: Path) -> tuple[KernelSpec, HopperRun]:
    body = only_body(built)
    template = next(
        t for t in TARGET.kernels if t.kind == "contract" and not t.accepts(body.graph)
    )
    assert template is CONTRACT_HOPPER
    numerics = derive("contract", body.graph, TARGET)
    assert (numerics.atom, numerics.chunk, numerics.segments) == ("mma", 0, 1)
    spec = KernelSpec("contract", body.graph, template.name, numerics, schedule, body.buffers)
    return spec, HopperRun(spec, template, folder)


def case_of(spec: KernelSpec, tokens: int, *, unknown: bool = False) -> Case:
    """One expert has no rows; an id that names none gives NaN."""
    r = np.random.default_rng(tokens)
    ids = (r.random((tokens, SLOTS)) ** 2 * (COUNT - 1)).astype(np.int32)
    name = spec.body.nodes[0].inputs[2]
    case = make_case(spec, {"tokens": tokens}, seed=7, given={name: torch.from_numpy(ids)})
    if not unknown:
        return case
    lost = torch.from_numpy(r.random((tokens, SLOTS)) < 0.2)
    changed = torch.where(lost, torch.tensor(COUNT + 1, dtype=torch.int32), torch.from_numpy(ids))
    expected = {n: t.where(~lost[..., None], torch.nan) for n, t in case.expected.items()}
    return Case({**case.arguments, name: changed}, case.dims, expected)


def bits(spec: KernelSpec, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    ((_, out),) = spec.body.outputs
    return arguments[out].contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    "name", [n if n == "led" else pytest.param(n, marks=pytest.mark.slow) for n in SCHEDULES]
)
@pytest.mark.parametrize("gated", [True, False])
def test_near_the_reference(name: str, gated: bool, tmp_path: Path) -> None:
    spec, made = run_of(graph(gated=gated), SCHEDULES[name], tmp_path)
    for tokens, unknown in ((1, False), (23, True)):
        case = case_of(spec, tokens, unknown=unknown)
        for output, error in errors(case, made.run_case(case)):
            assert error <= (2.0**-8 if gated else 2e-5), (output, tokens, error)


@pytest.mark.slow
def test_every_schedule_gives_the_same_bits(tmp_path: Path) -> None:
    """The sums of this machine have one order too; a row alone is among them."""
    found = []
    for name, schedule in SCHEDULES.items():
        spec, made = run_of(graph(gated=True), schedule, tmp_path / name)
        case = case_of(spec, 23)
        found.append(bits(spec, made.run_case(case)))
        one = {n: t[4:5].clone() if t.shape[:1] == (23,) else t for n, t in case.arguments.items()}
        alone = Case(one, {"tokens": 1}, {})
        assert torch.equal(bits(spec, made.run_case(alone))[0], found[-1][4])
    assert all(torch.equal(found[0], other) for other in found)


def test_what_other_kernels_take() -> None:
    refused = {
        "rows are not sorted by their matrix": linear([("fp4", 64)], 256),
        "weights are not fp4 codes": experts("fp8", n=64, k=256, shared=True, gated=True),
        "k = 96 is no multiple of 128": graph(gated=True, k=96),
    }
    for reason, built in refused.items():
        assert CONTRACT_HOPPER.accepts(only_body(built).graph) == reason


def test_schedules_follow_the_rows_that_a_matrix_meets() -> None:
    body = only_body(experts("fp4", n=64, k=256, shared=True, gated=True, count=384, slots=6))
    numerics = derive("contract", body.graph, TARGET)
    for tokens, wide, listed in ((1, 0, 0), (256, 0, 1), (8192, 3, 1)):
        first, *rest = CONTRACT_HOPPER.schedules(body.graph, numerics, tokens)
        assert (first.values["wide"], first.values["listed"]) == (wide, listed)
        assert {s.values["wide"] for s in (first, *rest)} == {0, 2, 3, 4}
