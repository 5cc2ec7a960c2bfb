"""Paged attention on both kinds of core, on the functional model: contexts of several chunks,
tokens of several requests in one tile, values against the fp64 reference, clean in both orders.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ascend_gqa import Problem, Step, build, make_step
from support.ascend_latent import PagedKernels

pytestmark = pytest.mark.cpu
PROBLEMS = {
    "threes": Problem(),
    "many": Problem(heads=40, kv_heads=2, width=48, block_size=32),
    "alone": Problem(heads=2, kv_heads=2, width=128, block_size=8),
}
CHUNK = 128
LONG = [(0, 19), (250, 7), (CHUNK - 2, 4), (390, 1)]  # one crosses a border within the step
LIMIT = 2.0**-7  # results are bf16


@pytest.fixture(scope="module")
def kernels(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> PagedKernels:
    graphs = {name: build(p) for name, p in PROBLEMS.items()}
    return PagedKernels.of(graphs, "attend", kernel_cache, tmp_path_factory.mktemp("gqa"))


def check(kernels: PagedKernels, name: str, step: Step) -> None:
    for adversarial in (False, True):
        kernels.built.model.configure(adversarial=adversarial)
        got = kernels.run(name, step.arrays, step.dims).double()
        assert bool(((got - step.want).abs() <= LIMIT * (0.1 + step.want.abs())).all())


@pytest.mark.parametrize("name", PROBLEMS)
def test_contexts_longer_than_a_chunk(kernels: PagedKernels, name: str) -> None:
    assert kernels.built.specs[name].template == "attend_cube"
    assert kernels.built.specs[name].numerics.chunk == CHUNK
    check(kernels, name, make_step(PROBLEMS[name], LONG, seed=1))


@settings(max_examples=5)
@given(ends=st.lists(st.integers(0, 300), min_size=1, max_size=4), count=st.integers(1, 6),
       seed=st.integers(0, 99))  # fmt: skip
def test_random_steps(kernels: PagedKernels, ends: list[int], count: int, seed: int) -> None:
    check(kernels, "threes", make_step(PROBLEMS["threes"], [(e, count) for e in ends], seed))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_token_alone_equals_it_among_others(kernels: PagedKernels, name: str) -> None:
    """Bit for bit, whatever tokens share its tile."""
    step = make_step(PROBLEMS[name], LONG, seed=5)
    kernels.built.model.configure()
    whole = kernels.run(name, step.arrays, step.dims)
    for chosen in ([0], [5, 20], [21, 25, 28], [30]):
        few = step.take(np.array(chosen))
        got = kernels.run(name, few.arrays, few.dims)
        assert torch.equal(got.view(torch.int16), whole[chosen].view(torch.int16))
