"""Latent attention for Hopper's matrix cores, on threads of this machine: near the fp64 reference,
whole or split the same bits, a token alone the same as among others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.contract_graphs import only_body
from support.hopper_run import HopperRun
from support.latent_cases import Problem, build, expected, make_step
from support.paged_steps import Step
from tilewright.codegen.emit import cuda_latent
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.targets.registry import resolve

pytestmark = pytest.mark.cpu
FLASH = Problem(heads=64, width=512, window=128, per_page=32, scaled=False)
CASES = {
    "window": replace(FLASH, op="attend_window", window_format="fp8"),
    "two groups of heads": replace(FLASH, op="attend_window", heads=128, window=70,
                                   window_format="v4"),
    "selected": replace(FLASH, window_format="fp8", entry_format="nvfp4", selected=300, ratio=1,
                        entries_per_page=16),
    "v4": replace(FLASH, window_format="v4", entry_format="v4", selected=70, window=40),
    "compressed": replace(FLASH, op="attend_compressed", window_format="v4", entry_format="v4",
                          entries_per_page=1, ratio=2),
}  # fmt: skip


SPLITS = {"whole": 0, "split": 1, "pairs": 2}


def runs(p: Problem, folder: Path, names: Sequence[str] = tuple(SPLITS)) -> dict[str, HopperRun]:
    target, _ = resolve("sm90")
    body = only_body(build(p))
    template = next(t for t in target.kernels if t.kind == "attend" and not t.accepts(body.graph))
    assert template.name == "latent_hopper"
    numerics = derive("attend", body.graph, target)
    return {
        name: HopperRun(
            KernelSpec("attend", body.graph, template.name, numerics,
                       Schedule.of(split=SPLITS[name]), body.buffers), template, folder / name)
        for name in names
    }  # fmt: skip


def operands(p: Problem, step: Step) -> dict[str, np.ndarray]:
    binding = only_body(build(p)).binding
    return {name: step.arrays[of] for name, of in binding.items() if of in step.arrays}


@pytest.mark.parametrize(
    "name", [n if n == "window" else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_near_the_reference(name: str, tmp_path: Path) -> None:
    p = CASES[name]
    made = runs(p, tmp_path)
    step = make_step(p, [(0, 1), (300, 1), (130, 1)], seed=3)
    whole, split, pairs = (made[n].run(operands(p, step), step.dims) for n in made)
    want = torch.from_numpy(expected(p, step))
    error = (whole.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
    assert float(error.max()) < 6e-3
    assert torch.equal(whole.view(torch.int16), split.view(torch.int16))
    assert torch.equal(whole.view(torch.int16), pairs.view(torch.int16))
    alone = step.take(np.array([1]))
    found = made["whole"].run(operands(p, alone), alone.dims)
    assert torch.equal(found[0].view(torch.int16), whole[1].view(torch.int16))


def test_blocks_take_tokens_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks for five tokens, one of them padding: the bits of a block for each."""
    p = CASES["window"]
    step = make_step(p, [(0, 1), (300, 1), (63, 2)], seed=5)
    each = runs(p, tmp_path / "each", ["whole"])["whole"].run(operands(p, step), step.dims)
    monkeypatch.setattr(cuda_latent, "MULTIPROCESSORS", 2)
    shared = runs(p, tmp_path / "two", ["whole"])["whole"].run(operands(p, step), step.dims)
    assert torch.equal(each.view(torch.int16), shared.view(torch.int16))
