"""Selection of entries on the CPU: exact on whole numbers, bits that depend on the token alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.index_cases import (
    MXFP4,
    PROBLEMS,
    SPANS,
    Problem,
    build,
    expected,
    make_step,
)
from support.launch import Kernels, equal_bytes
from support.paged_steps import Step
from support.tiny import quick_target
from tilewright.graph.ops.index import index_scores

pytestmark = pytest.mark.cpu
Array = NDArray[Any]
PICKED = {16: (0, 2, 19), 64: (0, 9)}  # schedules that differ in every field
@cache
def kernels(name: str, folder: Path, rows: int) -> Kernels:
    return Kernels(build(PROBLEMS[name]), quick_target(), folder, rows=rows, picked=PICKED[rows])


def output(kernels: Kernels, step: Step, index: int, threads: int = 2) -> Array:
    spec = kernels.specs[index % len(kernels.specs)]
    (found,) = kernels.run(spec, step.arrays, step.dims, threads=threads).values()
    return found


@pytest.fixture(scope="module", autouse=True)
def drop_kernels() -> Iterator[None]:
    yield
    kernels.cache_clear()


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_schedule_equals_the_reference(name: str, kernel_cache: Path) -> None:
    """Whole numbers make many ties, and sums exact in any order."""
    p, step = PROBLEMS[name], make_step(PROBLEMS[name], SPANS, seed=3)
    want = expected(p, step)
    for rows in (16, 64):
        made = kernels(name, kernel_cache, rows)
        assert made.num_legal >= 8
        for index, threads in zip(range(len(made.specs)), (1, 3, 4), strict=False):
            found = output(made, step, index, threads)
            np.testing.assert_array_equal(found, want, err_msg=str(made.specs[index].schedule))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_token_alone_equals_the_token_among_others(name: str, kernel_cache: Path) -> None:
    p, many = PROBLEMS[name], kernels(name, kernel_cache, 64)
    few = kernels(name, kernel_cache, 16)
    step = make_step(p, SPANS, seed=5, whole=False)
    whole = output(many, step, 0)
    for t in range(step.dims["tokens"]):
        found = output(few, step.take(np.array([t])), t, threads=1 + t % 3)
        assert found.tobytes() == whole[t : t + 1].tobytes(), t
    order = np.random.default_rng(0).permutation(step.dims["tokens"])
    assert output(many, step.take(order), 1).tobytes() == whole[order].tobytes()


@pytest.mark.parametrize("name", ["entries", "within"])
def test_prefill_cut_at_every_offset(name: str, kernel_cache: Path) -> None:
    p, made = PROBLEMS[name], kernels(name, kernel_cache, 64)
    step = make_step(p, [(45, 19)], seed=7, whole=False, padding=0)
    whole = output(made, step, 0)
    for cut in range(1, 19):
        chosen = (np.arange(cut), np.arange(cut, 19))
        parts = [output(made, step.take(c), cut) for c in chosen]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), cut


@pytest.mark.parametrize("name", ["entries", "blocks", "within"])
def test_random_scores_select_as_in_fp64_where_the_margin_is_clear(
    name: str, kernel_cache: Path
) -> None:
    p, made = PROBLEMS[name], kernels(name, kernel_cache, 16)
    step = make_step(p, SPANS, seed=13, whole=False)
    found = output(made, step, 1)[:, : p.k]
    operands = [torch.from_numpy(step.values[n]) for n in
                ("q", "w", "keys", "positions", "request_rows", "tables")]  # fmt: skip
    wide = [o.double() if o.is_floating_point() else o for o in operands]
    scores = index_scores(wide, {"k": p.k, "ratio": p.ratio}).numpy()
    for t in range(step.dims["tokens"]):
        row = scores[t].copy()
        if name == "within":
            row[
                ~np.isin(np.arange(len(row)) // p.block_size, step.values["candidates"][t])
            ] = -np.inf
        visible = int((row > -np.inf).sum())
        mine = found[t][found[t] >= 0]
        assert len(mine) == min(p.k, visible) and (np.diff(mine) > 0).all()
        if visible > p.k:
            border = np.sort(row)[-p.k]
            near = 1e-5 * float(np.abs(row[np.isfinite(row)]).max())
            assert (row[mine] >= border - near).all()
            assert np.isin(np.flatnonzero(row > border + near), mine).all()


def test_scores_that_are_not_numbers(kernel_cache: Path) -> None:
    """A NaN score takes a place and comes out as none; -inf is never selected; +inf is first."""
    for name in ("entries", "large"):
        p, made = PROBLEMS[name], kernels(name, kernel_cache, 16)
        step = make_step(p, [(1990, 2)], seed=1, padding=0)
        flat = step.arrays["keys"].reshape(-1, p.width).copy()
        rng = np.random.default_rng(2)
        for value in (np.nan, np.inf, -np.inf):
            flat[rng.permutation(len(flat))[:20]] = value
        keys = flat.reshape(step.arrays["keys"].shape)
        given = Step({**step.arrays, "keys": keys}, {**step.values, "keys": keys}, step.dims)
        # A product 0 * inf is NaN in the kernel and in the reference alike.
        want = expected(p, given)
        for index in range(len(made.specs)):
            np.testing.assert_array_equal(output(made, given, index), want)


@pytest.mark.parametrize(
    "entries", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
def test_a_long_row_of_entries(entries: int, kernel_cache: Path) -> None:
    p = Problem("select_with_blocks", heads=2, width=8, k=4096, blocks=64, block_size=64,
                per_page=256)  # fmt: skip
    made = Kernels(build(p), quick_target(), kernel_cache, rows=4, picked=(0, 1))
    step = make_step(p, [(entries - 1, 1)], seed=1, padding=0)
    want = expected(p, step)
    for index in range(len(made.specs)):
        np.testing.assert_array_equal(output(made, step, index), want)
    made.close()


@settings(
    max_examples=3,
    phases=[Phase.generate],  # every example compiles a kernel
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_shape(kernel_cache: Path, data: st.DataObject) -> None:
    def draw(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    p = Problem(
        op=draw("select_entries", "select_with_blocks", "select_within"),
        heads=draw(1, 3, 16, 33), width=draw(32, 64), ratio=draw(1, 2, 3), per_page=draw(1, 5, 64),
        k=draw(1, 8, 40, 300), blocks=draw(1, 4, 40), block_size=draw(1, 3, 64),
        key_format=draw("f32", "bf16", "mxfp4"), query=draw("f32", MXFP4),
    )  # fmt: skip
    made = Kernels(build(p), quick_target(), kernel_cache, rows=draw(4, 64), picked=(0, 6))
    spans = data.draw(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 4)), min_size=1,
                               max_size=4))  # fmt: skip
    step = make_step(p, spans, seed=data.draw(st.integers(0, 99)))
    found = [output(made, step, i, threads=1 + i) for i in range(2)]
    made.close()
    assert equal_bytes({"out": found[0]}, [{"out": f} for f in found])
    np.testing.assert_array_equal(found[0], expected(p, step))
