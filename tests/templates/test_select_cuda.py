"""Selection for Hopper's matrix cores, on threads of this machine: exactly what the reference
selects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.contract_graphs import only_body
from support.hopper_run import HopperRun
from support.index_cases import MXFP4, Problem, build, expected, make_step
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.targets.registry import resolve

pytestmark = pytest.mark.cpu
FLASH = Problem(heads=32, width=128, key_format="mxfp4", query=MXFP4, per_page=16)
CASES = {
    "entries": replace(FLASH, heads=64, ratio=2, k=60),
    "blocks": replace(FLASH, op="select_with_blocks", k=70, blocks=20, block_size=8),
    "within": replace(FLASH, op="select_within", k=50, blocks=30, block_size=8),
}  # fmt: skip


def run_of(p: Problem, folder: Path, slab: int) -> HopperRun:
    target, _ = resolve("sm90")
    body = only_body(build(p))
    template = next(t for t in target.kernels if t.kind == "select" and not t.accepts(body.graph))
    assert template.name == "select_hopper"
    numerics = derive("select", body.graph, target)
    schedule = Schedule.of(slab=slab, span=256)
    spec = KernelSpec("select", body.graph, template.name, numerics, schedule, body.buffers)
    return HopperRun(spec, template, folder)


@pytest.mark.parametrize(
    "name", [n if n == "entries" else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_selects_what_the_reference_selects(name: str, tmp_path: Path) -> None:
    p = CASES[name]
    step = make_step(p, [(0, 1), (300, 1), (1290, 1)], seed=4)
    binding = only_body(build(p)).binding
    arrays = {n: step.arrays[of] for n, of in binding.items() if of in step.arrays}
    found = run_of(p, tmp_path, 2).run(arrays, step.dims)
    want = torch.from_numpy(np.asarray(expected(p, step)))
    assert torch.equal(found.long(), want.long())
