"""Attention on both kinds of core, on the functional model: values against the fp64 reference,
clean in both orders, a token alone equal to it among others; states are NaN where no token looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ascend_latent import PagedKernels, graph_of, halved
from support.latent_cases import Problem, expected, make_step
from support.paged_steps import Step

pytestmark = pytest.mark.cpu
PROBLEMS = {
    "selected": Problem(window_format="fp8", entry_format="nvfp4", width=64, heads=20, window=140,
                        ratio=1, entries_per_page=8, selected=300),
    "compressed": Problem("attend_compressed", window_format="bf16", entry_format="v4_short",
                          width=80, heads=7, ratio=1, entries_per_page=8, window=13),
}  # fmt: skip
OTHERS = {
    "window": Problem("attend_window", heads=34, width=32, window=40, window_format="v4_short"),
    "v4": Problem(window_format="v4", entry_format="v4", width=512, heads=64, window=128, ratio=1,
                  selected=140),
}  # fmt: skip
SPANS = [(0, 3), (37, 2), (290, 1)]
LIMIT = 2.0**-7  # results are bf16


def kernels_of(problems: Mapping[str, Problem], cache: Path, work: Path) -> PagedKernels:
    return PagedKernels.of({n: graph_of(p) for n, p in problems.items()}, "attend", cache, work)


@pytest.fixture(scope="module")
def kernels(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> PagedKernels:
    return kernels_of(PROBLEMS, kernel_cache, tmp_path_factory.mktemp("attend"))


def check(kernels: PagedKernels, name: str, p: Problem, step: Step) -> None:
    want = torch.from_numpy(expected(p, step))
    for adversarial in (False, True):
        kernels.built.model.configure(adversarial=adversarial)
        got = kernels.run(name, halved(step), step.dims).double()
        assert bool(((got - want).abs() <= LIMIT * (0.1 + want.abs())).all())


@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_order(kernels: PagedKernels, name: str) -> None:
    assert kernels.built.specs[name].template == "latent_cube"
    check(kernels, name, PROBLEMS[name], make_step(PROBLEMS[name], SPANS, seed=1))


@pytest.mark.parametrize("name", PROBLEMS)
@settings(max_examples=3)
@given(end=st.integers(0, 200), more=st.integers(1, 3), seed=st.integers(0, 99))
def test_random_steps(kernels: PagedKernels, name: str, end: int, more: int, seed: int) -> None:
    p = PROBLEMS[name]
    check(kernels, name, p, make_step(p, [(end, more), (3, 1)], seed=seed))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_token_alone_equals_it_among_others(kernels: PagedKernels, name: str) -> None:
    """Bit for bit."""
    step = make_step(PROBLEMS[name], SPANS, seed=5)
    kernels.built.model.configure()
    whole = kernels.run(name, halved(step), step.dims)
    for token in (0, 4, 5):
        one = step.take(np.array([token]))
        alone = kernels.run(name, halved(one), one.dims)
        assert torch.equal(alone[0].view(torch.int16), whole[token].view(torch.int16))


@pytest.mark.slow
def test_other_formats_and_sizes(kernel_cache: Path, tmp_path: Path) -> None:
    others = kernels_of(OTHERS, kernel_cache, tmp_path)
    for name, p in OTHERS.items():
        check(others, name, p, make_step(p, [(0, 1), (150, 1)], seed=2))
