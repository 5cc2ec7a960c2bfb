"""Latent attention in Triton's interpreter: near the fp64 reference, bits of the token alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.latent_cases import Problem, build, expected, make_step
from support.paged_steps import Step
from support.triton_kernels import Interpreted, equal_bits
from tilewright.codegen.body import extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.codegen.select import select
from tilewright.codegen.spec import Schedule
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
    "selected": Problem(heads=5, width=64, window_format="fp8", entry_format="nvfp4", selected=40,
                        chunk=16),
    "between groups": Problem(heads=2, width=136, window_format="v4_short", entry_format="mxfp4",
                              chunk=16),
    "fp32 queries": Problem(heads=2, width=64, window_format="fp8", entry_format="mxfp4",
                            chunk=16, epilogue=False),
    "more heads": Problem("attend_window", heads=17, width=16, window=5, window_format="bf16",
                          chunk=16),
    "v4": Problem(heads=4, width=512, window=16, window_format="v4", entry_format="v4",
                  selected=70, chunk=64),
}  # fmt: skip


def made_for(p: Problem, folder: Path) -> Interpreted:
    return Interpreted(build(p), TARGET, folder, chunk=p.chunk)


def output(made: Interpreted, schedule: Schedule, step: Step) -> torch.Tensor:
    return made.run(schedule, step.arrays, step.dims)


def near(got: torch.Tensor, p: Problem, step: Step) -> bool:
    want = torch.from_numpy(expected(p, step))
    limit = (2.0**-7 if p.epilogue else 2e-5) * (1 + want.abs())
    return bool(((got.double() - want).abs() <= limit).all())


@pytest.mark.parametrize("name", CASES)
def test_schedules_equal_the_reference_and_each_other(name: str, tmp_path: Path) -> None:
    """The host's product of matrices has bits of its own for each count of rows and columns: those
    schedules are compared whose products have the same shape."""
    p = CASES[name]
    spans = SPANS[1:2] if p.heads > 16 or p.width > 200 else SPANS
    made, step = made_for(p, tmp_path), make_step(p, spans, seed=3)
    groups: dict[tuple[int, int], list[torch.Tensor]] = {}
    for schedule in made.distinct():
        shape = schedule.values["heads"], schedule.values["columns"]
        if shape[1] == 128 or name == "v4":
            groups.setdefault(shape, []).append(output(made, schedule, step))
    for split, whole in groups.values():
        assert near(split, p, step)
        assert equal_bits(split, whole)


def test_a_token_alone_equals_the_token_among_others(tmp_path: Path) -> None:
    p = CASES["selected"]
    made, step = made_for(p, tmp_path), make_step(p, SPANS, seed=5)
    split, whole = (
        s for s in made.distinct() if (s.values["heads"], s.values["columns"]) == (16, 128)
    )
    among = output(made, whole, step)
    for t in range(step.dims["tokens"]):
        assert equal_bits(output(made, split, step.take(np.array([t]))), among[t : t + 1])


def test_padding_gives_zeros_and_nothing_selected_is_the_window(tmp_path: Path) -> None:
    p = CASES["selected"]
    made, step = made_for(p, tmp_path), make_step(p, [(20, 1)], seed=1, padding=2)
    empty = np.full_like(step.arrays["selected"], -1)
    arrays, values = ({**a, "selected": empty} for a in (step.arrays, step.values))
    step = replace(step, arrays=arrays, values=values)
    for schedule in made.distinct()[:2]:
        found = output(made, schedule, step)
        assert near(found, p, step)
        assert found[0].any() and not found[1:].any()


def test_sinks_that_are_no_numbers(tmp_path: Path) -> None:
    p = CASES["window"]
    made, step = made_for(p, tmp_path), make_step(p, [(20, 1)], seed=2, padding=0)
    for sink in (-np.inf, np.inf):
        sinks = np.full(p.heads, sink, np.float32)
        given = replace(step, arrays={**step.arrays, "sink": sinks},
                        values={**step.values, "sink": sinks})  # fmt: skip
        found = output(made, made.distinct()[0], given)
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
