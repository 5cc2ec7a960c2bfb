"""Selection of entries with scores from the matrix unit, on the functional model: the reference's
lists exactly, in both orders, a token alone equal to it among others.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.ascend_latent import PagedKernels
from support.ascend_rows import TARGET
from support.index_cases import MXFP4, Problem, build, expected, make_step
from support.kernel_case import distinct_bodies
from support.paged_steps import Step
from tilewright.codegen.select import select
from tilewright.graph import Group
from tilewright.graph.errors import TargetError

pytestmark = pytest.mark.cpu
PROBLEMS = {
    "entries": Problem(k=40, ratio=2, heads=24, width=64, key_format="bf16", query=MXFP4),
    "blocks": Problem("select_with_blocks", key_format="mxfp4", query=MXFP4, k=9, blocks=4,
                      block_size=7),
    "within": Problem("select_within", key_format="mxfp4", query=MXFP4, blocks=60, k=12),
}  # fmt: skip
SPANS = [(0, 2), (137, 2), (700, 1)]
LARGE = {  # lists beside which no whole tile of entries stands
    "many": Problem(k=4096, heads=64, width=32, key_format="mxfp4", query=MXFP4),
    "wide": Problem(k=4096, heads=64, width=128),
}


@pytest.fixture(scope="module")
def kernels(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> PagedKernels:
    graphs = {name: build(p) for name, p in (PROBLEMS | LARGE).items()}
    return PagedKernels.of(graphs, "select", kernel_cache, tmp_path_factory.mktemp("select"))


def run(kernels: PagedKernels, name: str, step: Step) -> torch.Tensor:
    return kernels.run(name, step.arrays, step.dims)


@pytest.mark.parametrize("name", PROBLEMS)
def test_lists_are_the_references(kernels: PagedKernels, name: str) -> None:
    """Scores are whole numbers, which any order of sums gives: ties too go where they should."""
    assert kernels.built.specs[name].template == "select_cube"
    p = PROBLEMS[name]
    for seed in (1, 2):
        step = make_step(p, SPANS, seed)
        want = torch.from_numpy(expected(p, step)).int()
        for adversarial in (False, True):
            kernels.built.model.configure(adversarial=adversarial)
            assert torch.equal(run(kernels, name, step), want)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_token_alone_equals_it_among_others(kernels: PagedKernels, name: str) -> None:
    step = make_step(PROBLEMS[name], SPANS, 5, whole=False)
    kernels.built.model.configure()
    whole = run(kernels, name, step)
    for token in (1, 3, 4):
        alone = run(kernels, name, step.take(np.array([token])))
        assert torch.equal(alone[0], whole[token])


@pytest.mark.parametrize("name", LARGE)
def test_lists_of_four_thousand(kernels: PagedKernels, name: str) -> None:
    """On the matrix unit and on the vector cores, where a tile of keys is smaller for it."""
    templates = {"many": "select_cube", "wide": "select"}
    assert kernels.built.specs[name].template == templates[name]
    step = make_step(LARGE[name], [(4600, 1), (90, 1)], 3)
    want = torch.from_numpy(expected(LARGE[name], step)).int()
    kernels.built.model.configure(adversarial=True)
    assert torch.equal(run(kernels, name, step), want)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem(k=20000, heads=64, width=128, key_format="mxfp4", query=MXFP4),
         "select_cube: a list of 20000 entries does not fit the unified buffer: want k of at most "
         "8824; select: a list of 20000 entries does not fit the unified buffer: want k of at most "
         "8072"),
        (Problem(k=9000, heads=64, width=128),
         "select_cube: keys or queries are f32, want bf16 or codes; select: a list of 9000 entries "
         "does not fit the unified buffer: want k of at most 6944"),
    ],
)  # fmt: skip
def test_longer_lists_are_refused(problem: Problem, message: str) -> None:
    ((name, kind, body),) = distinct_bodies(build(problem))
    with pytest.raises(TargetError) as caught:
        select(Group(name, kind, ()), body, TARGET)
    start = f"no kernel accepts 'select_entries' of '{name}' on ascend950: "
    assert str(caught.value) == start + message
