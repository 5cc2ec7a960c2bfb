"""Contractions of bf16 in TileLang for SM90, between kernels in Triton's interpreter: what TileLang
prints runs on threads; near the fp64 reference, and every schedule gives the same bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import triton_run
from support.contract_graphs import linear, only_body, residual
from support.kernel_case import Case, errors, make_case
from tilewright.codegen.emit.tilelang import TURNED, UPRIGHT
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph
from tilewright.targets.nvidia.hopper_contract import LINEAR
from tilewright.targets.registry import resolve

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        importlib.util.find_spec("tilelang") is None, reason="TileLang is not installed"
    ),
]
TARGET = resolve("sm90")[0]
COMMON = {"row_warps": 4, "listed": 0, "cores": 2, "bk": 64, "staged": 0, "teams": 1}
UPRIGHT_TILE = {**COMMON, "tilelang": UPRIGHT, "bm": 64, "bn": 64, "warps": 4, "stages": 3}
WIDE_TILE = {**COMMON, "tilelang": UPRIGHT, "bm": 128, "bn": 64, "warps": 8, "stages": 2}
STAGED_TILE = {**WIDE_TILE, "staged": 1}
TEAMS = {**UPRIGHT_TILE, "warps": 8, "teams": 2, "staged": 1}
TURNED_TILE = {**COMMON, "tilelang": TURNED, "bm": 8, "bn": 64, "warps": 4, "stages": 2}


def spec_of(graph: Graph, segments: int, schedule: dict[str, int]) -> KernelSpec:
    body = only_body(graph)
    numerics = replace(derive("contract", body.graph, TARGET), segments=segments)
    chosen = Schedule.of(**schedule)
    return KernelSpec("contract", body.graph, "contract", numerics, chosen, body.buffers)


def run(spec: KernelSpec, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    return triton_run.run_spec(spec, LINEAR, case, folder)


def agree(
    graph: Callable[[], Graph], segments: int, schedules: list[dict[str, int]], tokens: int,
    folder: Path,
) -> None:
    """Near the reference, and one result over schedules."""
    found = []
    for schedule in schedules:
        spec = spec_of(graph(), segments, schedule)
        case = make_case(spec, {"tokens": tokens}, seed=4)
        got = run(spec, case, folder)
        for output, error in errors(case, got):
            rounded = got[output].dtype == torch.bfloat16
            assert error <= (2.0**-8 if rounded else 2e-5), (schedule, output, error)
        found.append([got[v].view(torch.uint8).numpy().tobytes() for _, v in spec.body.outputs])
    assert all(found[0] == other for other in found)


def test_a_tile_with_tails_on_all_sides(tmp_path: Path) -> None:
    """72 columns and 71 rows of tiles of 64, k of 104 in steps of 64; two products meet."""
    pair = [("bf16", 72), ("bf16", 72)]
    agree(lambda: linear(pair, 104, gated=True), 1, [{**UPRIGHT_TILE, "split": 0}], 71, tmp_path)


def test_operands_of_rows_and_columns_follow_the_sums(tmp_path: Path) -> None:
    """Read by the threads, or brought and taken away by the copy engine, by teams in turn."""
    schedules = [{**s, "split": 0} for s in (TURNED_TILE, TEAMS)]
    agree(lambda: residual(136, 72), 1, schedules, 5, tmp_path)


def test_segments_beside_and_after_each_other_agree(tmp_path: Path) -> None:
    """Results in sections of their own; the last of two segments is short."""
    sections = [("bf16", 72), ("bf16", 8)]
    schedules = [{**UPRIGHT_TILE, "split": 0}, {**TURNED_TILE, "split": 1, "bk": 256}]
    agree(lambda: linear(sections, 328), 2, schedules, 3, tmp_path)


@pytest.mark.slow
def test_two_groups_of_warps_agree_with_one(tmp_path: Path) -> None:
    schedules = [
        {**s, "split": 0} for s in (UPRIGHT_TILE, WIDE_TILE, TURNED_TILE, TEAMS, STAGED_TILE)
    ]
    agree(lambda: residual(72, 136), 1, schedules, 131, tmp_path)


@pytest.mark.slow
def test_a_row_is_its_own(tmp_path: Path) -> None:
    spec = spec_of(linear([("bf16", 72)], 136), 1, {**TURNED_TILE, "split": 0})
    case = make_case(spec, {"tokens": 11}, seed=2)
    whole = run(spec, case, tmp_path)
    ((_, out),) = spec.body.outputs
    one = {n: t[3:4].clone() if t.shape[:1] == (11,) else t for n, t in case.arguments.items()}
    alone = run(spec, Case(one, {"tokens": 1}, {}), tmp_path)
    assert torch.equal(alone[out][0], whole[out][3])
