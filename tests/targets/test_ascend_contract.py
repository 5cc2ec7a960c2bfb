"""Contractions whose weights the vector cores decode, on the functional model: values against the
fp64 reference, clean in both orders, one row alone equal to the same row among many.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ascend_contract import (
    ACTIVATION,
    ACTIVATION_WIDE,
    FP4,
    FP8,
    contract_case,
    experts,
    gated,
    groups,
    plain,
    quantised_with_residual,
)
from support.ascend_rows import TARGET
from support.ascend_run import Built, build, printing_folder, specs_of
from support.kernel_case import distinct_bodies
from tilewright.targets.ascend950.toolchain import AscendToolchain

pytestmark = pytest.mark.cpu
QUICK = {
    "fp8": quantised_with_residual(FP8, 96, 40),
    "f32": plain("f32", 77, 24),
    "experts": experts(FP4, 96, 50, 2, 7, shared=True),
    "groups": groups(64, 40, 3),
    "mx_experts": experts(FP4, 352, 50, 2, 7, shared=True, activation=ACTIVATION),
}
OTHERS = {
    "fp4": plain(FP4, 160, 33),
    "gated": gated(288, 70, 20),
    "apart": experts(FP8, 64, 33, 3, 4, shared=False),
    "bf16_experts": experts("bf16", 41, 20, 2, 3, shared=True),
    "mx_gated": gated(1056, 140, 20, ACTIVATION_WIDE),
    "mx_apart": experts(FP8, 96, 33, 3, 4, shared=False, activation=ACTIVATION),
    "mx_groups": groups(64, 40, 3, ACTIVATION),
}
# What is left beside rounding to bf16 is the order of sums.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


def built_of(names: list[str], cache: Path, work: Path) -> Built:
    graphs = {**QUICK, **OTHERS}
    bodies = [(name, k, b) for name in names for _, k, b in distinct_bodies(graphs[name])]
    toolchain = AscendToolchain(TARGET, folder=printing_folder(cache))
    return build(specs_of(bodies, TARGET), TARGET, toolchain, cache, work)


@pytest.fixture(scope="module")
def quick(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built_of(list(QUICK), kernel_cache, tmp_path_factory.mktemp("contract"))


def check(built: Built, name: str, tokens: int, seed: int, *, stray: bool = False) -> None:
    case = contract_case(built.specs[name], tokens, seed=seed, stray=stray)
    for adversarial in (False, True):
        built.model.configure(adversarial=adversarial)
        got = built.launch(name, dict(case.arguments), case.dims)
        for value, want in case.expected.items():
            limit = TOLERANCE[got[value].dtype] * want.nan_to_num().abs().amax(-1, keepdim=True)
            found = got[value].double()
            assert torch.equal(found.isnan(), want.isnan())
            assert bool(((found - want).abs() <= limit)[~want.isnan()].all())


def test_codes_meet_codes_in_the_mx_form(quick: Built) -> None:
    found = {name: quick.specs[name].template for name in QUICK}
    assert found == {
        "fp8": "contract_mx", "f32": "contract_coded", "experts": "contract_coded",
        "groups": "contract_coded", "mx_experts": "contract_mx",
    }  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_values_and_order(quick: Built, name: str) -> None:
    for tokens, seed in ((1, 1), (37, 2), (64, 3)):
        check(quick, name, tokens, seed)


def test_ids_out_of_range_give_nan(quick: Built) -> None:
    check(quick, "experts", 21, 4, stray=True)


@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=4)
@given(tokens=st.integers(1, 64), seed=st.integers(0, 99))
def test_random_extents(quick: Built, name: str, tokens: int, seed: int) -> None:
    check(quick, name, tokens, seed)


@pytest.mark.parametrize("name", QUICK)
def test_one_row_alone_equals_it_among_many(quick: Built, name: str) -> None:
    """Bit for bit, though experts sort rows with those of other tokens."""
    spec = quick.specs[name]
    many = contract_case(spec, 50, seed=5)
    whole = quick.launch(name, dict(many.arguments), many.dims)
    per_row = [*(i.name for i in spec.body.inputs), *many.expected]
    for row in (0, 31, 32, 49):
        alone = {k: v[row : row + 1] if k in per_row else v for k, v in many.arguments.items()}
        got = quick.launch(name, alone, {"tokens": 1})
        for value in many.expected:
            assert torch.equal(_bits(got[value][0]), _bits(whole[value][row]))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


@pytest.mark.slow
def test_other_formats_and_shapes(kernel_cache: Path, tmp_path: Path) -> None:
    built = built_of(list(OTHERS), kernel_cache, tmp_path)
    for name in OTHERS:
        for tokens, seed in ((1, 1), (37, 2), (64, 3)):
            check(built, name, tokens, seed, stray="experts" in name)
