"""Selection of entries in Triton's interpreter: exact on whole numbers, whatever the split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.index_cases import MXFP4, Problem, build, expected, make_step
from support.paged_steps import Step
from support.triton_kernels import Interpreted
from tilewright.codegen.body import extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.codegen.select import select
from tilewright.codegen.spec import Schedule
from tilewright.graph.errors import TargetError
from tilewright.targets.registry import resolve

TARGET = resolve("sm90")[0]
CASES = {
    "entries": Problem(k=40, ratio=2, heads=7, width=40),
    "bf16": Problem(k=3, heads=16, key_format="bf16", query="bf16"),
    "blocks": Problem("select_with_blocks", key_format="mxfp4", query=MXFP4, k=9, blocks=4),
    "within": Problem("select_within", key_format="mxfp4", query=MXFP4, blocks=6, k=12),
}
SPANS = [(0, 1), (450, 1)]  # interpreted programs take 0.1 s each


def output(made: Interpreted, schedule: Schedule, step: Step) -> np.ndarray:
    found: np.ndarray = made.run(schedule, step.arrays, step.dims).numpy()
    return found


def few(parts: int, tile: int = 128) -> Schedule:
    return Schedule.of(tile=tile, parts=parts, warps=4, stages=1)


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_equals_the_reference(name: str, tmp_path: Path) -> None:
    """Whole numbers make many ties, and sums exact in any order."""
    p = CASES[name]
    made, step = Interpreted(build(p), TARGET, tmp_path), make_step(p, SPANS, seed=3)
    want = expected(p, step)
    schedules = {(s.values["tile"], s.values["parts"]) for s in made.distinct()}
    assert schedules >= {(128, 1), (128, 8), (256, 1), (256, 32)}
    for schedule in (few(1), few(3)) if name != "bf16" else (few(2, 256),):
        np.testing.assert_array_equal(output(made, schedule, step), want, str(schedule))


def test_buffers_that_fill_again_and_again(tmp_path: Path) -> None:
    """Scores that rise with the entry pass every threshold."""
    p = Problem("select_with_blocks", heads=1, width=8, k=30, blocks=17, block_size=4)
    made, step = Interpreted(build(p), TARGET, tmp_path), make_step(p, [(619, 1)], seed=1)
    for rising in (True, False):
        order = np.arange(620) if rising else np.arange(620)[::-1]
        slot = step.arrays["tables"][0][np.arange(620) // p.per_page] * p.per_page
        keys = step.values["keys"].copy()
        flat = keys.reshape(-1, p.width)
        flat[:] = 0
        flat[slot + np.arange(620) % p.per_page, 0] = order // 3
        q = np.zeros_like(step.values["q"])
        q[..., 0] = 1
        arrays = {**step.arrays, "keys": keys, "q": q, "w": np.ones_like(step.arrays["w"])}
        given = replace(step, arrays=arrays, values={**step.values, **arrays})
        want = expected(p, given)
        for parts in (1, 3) if rising else (1,):
            np.testing.assert_array_equal(output(made, few(parts), given), want)


def test_a_token_alone_equals_the_token_among_others(tmp_path: Path) -> None:
    p = CASES["blocks"]
    made, step = Interpreted(build(p), TARGET, tmp_path), make_step(p, SPANS, seed=5, whole=False)
    among = output(made, few(1), step)
    for t in range(step.dims["tokens"]):
        found = output(made, few(3), step.take(np.array([t])))
        np.testing.assert_array_equal(found, among[t : t + 1])


def test_scores_that_are_no_numbers(tmp_path: Path) -> None:
    """NaN takes a place and is not written; -inf is never chosen; +inf is first."""
    p = Problem(heads=1, width=8, k=6, per_page=16)
    made, step = Interpreted(build(p), TARGET, tmp_path), make_step(p, [(20, 1)], seed=4, padding=0)
    keys = step.values["keys"].copy()
    slots = step.arrays["tables"][0][np.arange(21) // 16] * 16 + np.arange(21) % 16
    flat = keys.reshape(-1, p.width)
    flat[slots] = 0
    flat[slots, 0] = [*range(1, 19), np.nan, np.inf, 5]
    q, w = np.zeros_like(step.values["q"]), np.ones_like(step.arrays["w"])
    q[..., 0] = 1
    for sign in (1, -1):
        arrays = {**step.arrays, "keys": keys, "q": q, "w": w * sign}
        given = replace(step, arrays=arrays, values={**step.values, **arrays})
        found = output(made, few(1), given)
        np.testing.assert_array_equal(found, expected(p, given))
        assert 18 not in found and (19 in found) == (sign == 1)


def test_candidates_in_any_order_and_twice(tmp_path: Path) -> None:
    p = CASES["within"]
    made, step = Interpreted(build(p), TARGET, tmp_path), make_step(p, [(90, 3)], seed=2, padding=1)
    lists = [[3, -1, 0, 3, 7, 0], [22, 21, 5, 4, 3, 900], [-1] * 6, [1, 2, 3, 4, 5, 6]]
    candidates = np.array(lists, np.int32)
    arrays = {**step.arrays, "candidates": candidates}
    given = replace(step, arrays=arrays, values={**step.values, "candidates": candidates})
    want = expected(p, given)
    assert (want[2] == -1).all() and (want[0] >= 0).any()
    for parts in (1, 3):
        np.testing.assert_array_equal(output(made, few(parts), given), want)


def test_what_the_template_refuses() -> None:
    def refusal(p: Problem) -> str:
        lowered = lower(build(p), Flags()).graph
        with pytest.raises(TargetError) as caught:
            select(lowered.groups[0], extract(lowered, lowered.groups[0]), TARGET)
        return str(caught.value)

    odd = Problem("select_with_blocks", block_size=7)
    assert "select: blocks of 7 entries: want a power of two up to 128" in refusal(odd)
    assert "select: 5000 are selected, want at most 4096" in refusal(Problem(k=5000))
