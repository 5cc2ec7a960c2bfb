"""Latent attention on the CPU: close to the fp64 reference; bits depend on the token alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.latent_cases import (
    PROBLEMS,
    SPANS,
    Problem,
    build,
    expected,
    make_step,
    widened,
)
from support.launch import Kernels, equal_bytes
from support.paged_steps import Step
from support.tiny import quick_target

pytestmark = pytest.mark.cpu
Array = NDArray[Any]


PICKED = {16: (0, 4, 10, 19), 64: (0, 9, 20)}  # schedules that differ in every field


@cache
def kernels(name: str, folder: Path, rows: int) -> Kernels:
    p = PROBLEMS[name]
    return Kernels(build(p), quick_target(), folder, rows=rows, picked=PICKED[rows], chunk=p.chunk)


def output(kernels: Kernels, step: Step, index: int, threads: int = 2) -> dict[str, Array]:
    """Run the schedule numbered `index`."""
    return kernels.run(kernels.specs[index % len(kernels.specs)], step.arrays, step.dims,
                       threads=threads)  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_schedule_equals_the_reference_and_the_others(name: str, kernel_cache: Path) -> None:
    p, step = PROBLEMS[name], make_step(PROBLEMS[name], SPANS, seed=3)
    want = expected(p, step)
    first: dict[str, Array] | None = None
    for rows in (16, 64):
        made = kernels(name, kernel_cache, rows)
        assert made.num_legal >= 8
        for index, threads in zip(range(len(made.specs)), (1, 3, 2, 4), strict=False):
            found = output(made, step, index, threads)
            if first is None:
                first = found
                bound = 2.0**-7 if p.epilogue else 2e-6  # rounding to bf16; sums in fp32
                limit = bound * (1 + np.abs(want))
                assert (np.abs(widened(p, found) - want) <= limit).all()
            assert equal_bytes(first, [found]), made.specs[index].schedule


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_token_alone_equals_the_token_among_others(name: str, kernel_cache: Path) -> None:
    p, made = PROBLEMS[name], kernels(name, kernel_cache, 64)
    step = make_step(p, SPANS, seed=5)
    (whole,) = output(made, step, 0).values()
    few = kernels(name, kernel_cache, 16)
    for t in range(step.dims["tokens"]):
        alone = step.take(np.array([t]))
        for index in (0, 1, 5):
            (found,) = output(few, alone, index, threads=1 + t % 3).values()
            assert found.tobytes() == whole[t : t + 1].tobytes(), (t, index)


@pytest.mark.parametrize("name", ["window", "compressed", "selected"])
def test_prefill_cut_at_every_offset(name: str, kernel_cache: Path) -> None:
    p, made = PROBLEMS[name], kernels(name, kernel_cache, 64)
    step = make_step(p, [(5, 23)], seed=7, padding=0)
    (whole,) = output(made, step, 0).values()
    for cut in range(1, 23):
        parts = []
        for chosen in (np.arange(cut), np.arange(cut, 23)):
            parts.append(next(iter(output(made, step.take(chosen), cut).values())))
        assert np.concatenate(parts).tobytes() == whole.tobytes(), cut


def test_order_of_tokens_and_neighbours_do_not_matter(kernel_cache: Path) -> None:
    p, made = PROBLEMS["selected"], kernels("selected", kernel_cache, 64)
    step = make_step(p, SPANS, seed=11)
    (whole,) = output(made, step, 0).values()
    order = np.random.default_rng(0).permutation(step.dims["tokens"])
    (found,) = output(made, step.take(order), 3).values()
    assert found.tobytes() == whole[order].tobytes()


def test_padding_gives_zeros(kernel_cache: Path) -> None:
    p, made = PROBLEMS["window"], kernels("window", kernel_cache, 16)
    step = make_step(p, [(0, 1)], seed=1, padding=3)
    (found,) = output(made, step, 0).values()
    assert not found[1:].any()
    assert found[0].any()


def test_values_that_are_not_numbers_stay_with_their_token(kernel_cache: Path) -> None:
    """A NaN in q, and -inf and +inf sinks."""
    p, made = PROBLEMS["window"], kernels("window", kernel_cache, 64)
    step = make_step(p, [(20, 4)], seed=2, padding=0)
    (plain,) = output(made, step, 0).values()
    q = step.arrays["q"].copy()
    q[1] = 0x7FC0
    (found,) = output(made, replace(step, arrays={**step.arrays, "q": q}), 0).values()
    assert found[[0, 2, 3]].tobytes() == plain[[0, 2, 3]].tobytes()
    assert np.isnan((found[1].astype(np.uint32) << 16).view(np.float32)).all()
    for sink in (-np.inf, np.inf):
        sinks = np.full(p.heads, sink, np.float32)
        values = {**step.values, "sink": sinks}
        given = Step({**step.arrays, "sink": sinks}, values, step.dims)
        got = widened(p, output(made, given, 0))
        want = expected(p, given) if sink < 0 else np.full(got.shape, np.nan)
        np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=2.0**-7)


@pytest.fixture(scope="module", autouse=True)
def close_pools() -> Iterator[None]:
    yield
    kernels.cache_clear()


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
        op=draw("attend_window", "attend_compressed", "attend_selected"),
        heads=draw(1, 3, 16, 17, 33), width=draw(8, 24, 64, 136), window=draw(1, 5, 40),
        per_page=draw(1, 3, 64), ratio=draw(1, 2, 3), entries_per_page=draw(1, 5, 32),
        selected=draw(1, 8, 40), window_format=draw("f32", "bf16", "fp8"),
        entry_format=draw("f32", "bf16", "nvfp4", "mxfp4"), chunk=draw(1, 16, 31),
        epilogue=data.draw(st.booleans()),
    )  # fmt: skip
    rows = draw(4, 64)
    made = Kernels(build(p), quick_target(), kernel_cache, rows=rows, picked=(0, 7), chunk=p.chunk)
    spans = data.draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), min_size=1,
                               max_size=4))  # fmt: skip
    step = make_step(p, spans, seed=data.draw(st.integers(0, 99)))
    found = [output(made, step, i, threads=1 + i) for i in range(2)]
    made.close()
    assert equal_bytes(found[0], found[1:])
    want = expected(p, step)
    # Scores are sums of up to `width` products: their error goes into every weight.
    largest = max(
        np.nanmax(np.abs(step.values[n])) for n in ("window", "entries") if n in step.values
    )
    limit = (2.0**-7 if p.epilogue else 0.0) * np.abs(want) + 1e-5 * (1 + largest)
    assert (np.abs(widened(p, found[0]) - want) <= limit).all()
