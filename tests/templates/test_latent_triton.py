"""Latent attention in Triton's interpreter: near the fp64 reference, bits of the token alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import triton_run
from support.latent_cases import Problem, Step, build, expected, make_step
from tilewright.codegen.body import extract
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.select import select
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph.errors import TargetError
from tilewright.targets.registry import resolve

TARGET = resolve("sm90")[0]
# Interpreted programs take 0.1 s each: few heads and few tokens.
SPANS = [(0, 1), (37, 2), (60, 1)]
CASES = {
    "window": Problem("attend_window", heads=3, width=40, window=13, chunk=16),
    "plain": Problem("attend_window", heads=2, width=24, window=40, window_format="bf16", chunk=16),
    "compressed": Problem("attend_compressed", heads=5, entry_format="v4_short",
                          window_format="v4_short", chunk=16),
    "tails": Problem("attend_compressed", heads=3, entry_format="bf16", window_format="v4_short",
                     chunk=16, epilogue=True),
    "selected": Problem(heads=17, width=64, window_format="fp8", entry_format="nvfp4", selected=40,
                        chunk=16),
    "between groups": Problem(heads=2, width=136, window_format="v4_short", entry_format="mxfp4",
                              chunk=16),
    "fp32 queries": Problem(heads=2, width=64, window_format="fp8", entry_format="mxfp4",
                            chunk=16, epilogue=False),
    "v4": Problem(heads=4, width=512, window=16, window_format="v4", entry_format="v4",
                  selected=70, chunk=64),
}  # fmt: skip


class Kernels:
    """The kernel of a problem in every schedule that is asked for."""

    def __init__(self, p: Problem, folder: Path) -> None:
        lowered = lower(build(p), Flags()).graph
        (group,) = lowered.groups
        self.body, self.folder = extract(lowered, group), folder
        self.template: KernelTemplate = select(group, self.body, TARGET).template
        self.numerics = replace(derive("attend", self.body.graph, TARGET), chunk=p.chunk)

    def schedules(self, rows: int) -> tuple[Any, ...]:
        return self.template.schedules(self.body.graph, self.numerics, rows)

    def distinct(self) -> list[Any]:
        """Schedules of different texts: warps and stages are the compiler's."""
        found = [s for rows in (1, 100) for s in self.schedules(rows)]
        return list({(s.values["split"], s.values["heads"]): s for s in found}.values())

    def run(self, schedule: Any, step: Step) -> torch.Tensor:
        spec = KernelSpec("attend", self.body.graph, self.template.name, self.numerics, schedule,
                          self.body.buffers)  # fmt: skip
        module = triton_run.load(emit(spec, self.template).text, spec.symbol, self.folder)
        need = self.template.scratch_bytes(spec.body, spec.numerics, schedule, step.dims)
        arguments = operands(spec, self.body.binding, step)
        arguments["workspace"] = torch.full((need,), 255, dtype=torch.uint8)
        triton_run.run(module, arguments, step.dims)
        ((_, result),) = spec.body.outputs
        return arguments[result]


def operands(
    spec: KernelSpec, binding: Mapping[str, str], step: Step
) -> dict[str, torch.Tensor]:
    """Arguments by name as they lie in memory; the output is poisoned."""
    found = {}
    for name in binding:
        array = step.arrays.get(binding[name])
        type_ = spec.stored_type(name)
        if array is None:
            dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[type_.dtype.name]
            shape = step.dims["tokens"], *(int(d) for d in type_.shape[1:])
            found[name] = torch.full(shape, torch.nan, dtype=dtype)
            continue
        tensor = torch.from_numpy(np.ascontiguousarray(array).copy())
        found[name] = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    return found


def near(got: torch.Tensor, p: Problem, step: Step) -> bool:
    want = torch.from_numpy(expected(p, step))
    limit = (2.0**-7 if p.epilogue else 2e-5) * (1 + want.abs())
    return bool(((got.double() - want).abs() <= limit).all())


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", CASES)
def test_schedules_equal_the_reference_and_each_other(name: str, tmp_path: Path) -> None:
    """The host's product of matrices has bits of its own for each count of rows: those schedules
    are compared whose programs take as many heads."""
    p = CASES[name]
    made, step = Kernels(p, tmp_path), make_step(p, SPANS, seed=3)
    groups: dict[int, list[torch.Tensor]] = {}
    for schedule in made.distinct():
        groups.setdefault(schedule.values["heads"], []).append(made.run(schedule, step))
    for split, whole in groups.values():
        assert near(split, p, step)
        assert equal(split, whole)


def test_a_token_alone_equals_the_token_among_others(tmp_path: Path) -> None:
    p = CASES["selected"]
    made, step = Kernels(p, tmp_path), make_step(p, SPANS, seed=5)
    split, whole = (s for s in made.distinct() if s.values["heads"] == 32)
    among = made.run(whole, step)
    for t in range(step.dims["tokens"]):
        assert equal(made.run(split, step.take(np.array([t]))), among[t : t + 1])


def test_padding_gives_zeros_and_nothing_selected_is_the_window(tmp_path: Path) -> None:
    p = CASES["selected"]
    made, step = Kernels(p, tmp_path), make_step(p, [(20, 1)], seed=1, padding=2)
    empty = np.full_like(step.arrays["selected"], -1)
    arrays, values = ({**a, "selected": empty} for a in (step.arrays, step.values))
    step = replace(step, arrays=arrays, values=values)
    for schedule in made.distinct()[:2]:
        found = made.run(schedule, step)
        assert near(found, p, step)
        assert found[0].any() and not found[1:].any()


def test_sinks_that_are_no_numbers(tmp_path: Path) -> None:
    p = CASES["window"]
    made, step = Kernels(p, tmp_path), make_step(p, [(20, 1)], seed=2, padding=0)
    for sink in (-np.inf, np.inf):
        sinks = np.full(p.heads, sink, np.float32)
        given = replace(step, arrays={**step.arrays, "sink": sinks},
                        values={**step.values, "sink": sinks})  # fmt: skip
        found = made.run(made.distinct()[0], given)
        assert near(found, p, given) if sink < 0 else bool(found.isnan().all())


def test_what_the_template_refuses() -> None:
    def refusal(p: Problem) -> str:
        lowered = lower(build(p), Flags()).graph
        with pytest.raises(TargetError) as caught:
            select(lowered.groups[0], extract(lowered, lowered.groups[0]), TARGET)
        return str(caught.value)

    assert "latent: width 20 is no multiple of 8" in refusal(Problem("attend_window", width=20))
    wide = Problem("attend_window", width=512, epilogue=False)
    assert "latent: fp32 rows are 512 wide, want at most 256" in refusal(wide)
