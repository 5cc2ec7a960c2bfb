"""Kernels of the Ascend target on the functional model: values against the fp64 reference on odd
extents, clean in normal and in adversarial order, one row alone equal to the same row among many.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ascend_run import Built, build, printing_folder, specs_of
from support.kernel_case import distinct_bodies, errors, make_case
from support.tiny import tiny_graph
from tilewright.codegen.config import CompileConfig
from tilewright.targets.ascend950.target import ascend950_target
from tilewright.targets.ascend950.toolchain import AscendToolchain

pytestmark = pytest.mark.cpu
SETTINGS = CompileConfig(
    max_context=64, max_tokens_per_step=40, max_requests=8, block_size=8, dtype="bfloat16"
)
TARGET = ascend950_target("950-4+model")
# bf16 products are exact in fp32: what is left is the order of sums, angles, and the last place of
# bf16 where a sum falls on the other side of a rounding.
TOLERANCE = {"float32": 3e-4, "bfloat16": 2.0**-7, "int32": 0.0}
KERNELS = (
    "embedding",
    "layers.0.append_v",
    "layers.0.attend",
    "layers.0.q_proj",
    "layers.0.o_proj",
    "layers.0.gate_proj",
    "logits",
    "argmax",
)


@pytest.fixture(scope="module")
def built(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    bodies = [b for b in distinct_bodies(tiny_graph("bf16", settings=SETTINGS)) if b[0] in KERNELS]
    toolchain = AscendToolchain(TARGET, folder=printing_folder(kernel_cache))
    specs = specs_of(bodies, TARGET)
    return build(specs, TARGET, toolchain, kernel_cache, tmp_path_factory.mktemp("ascend"))


def dims(tokens: int, requests: int, blocks: int, rows: int) -> dict[str, int]:
    return {
        "tokens": tokens,
        "requests": requests,
        "request_blocks": blocks,
        "cache_blocks": requests * blocks + 5,
        "logit_rows": rows,
    }


def check(built: Built, name: str, extents: dict[str, int], seed: int) -> None:
    """Values within tolerance, and no fault, in both orders."""
    case = make_case(built.specs[name], extents, seed=seed)
    for adversarial in (False, True):
        got = built.run(name, case, adversarial=adversarial)
        for value, error in errors(case, got):
            kind = str(got[value].dtype).removeprefix("torch.")
            assert error <= TOLERANCE[kind], f"{name} {value} {extents}: {error}"


@pytest.mark.parametrize("name", KERNELS)
def test_values_and_order(built: Built, name: str) -> None:
    check(built, name, dims(37, 3, 8, 5), seed=1)
    check(built, name, dims(1, 1, 1, 1), seed=2)


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=6)
@given(
    tokens=st.integers(1, 40),
    requests=st.integers(1, 4),
    blocks=st.integers(1, 8),
    rows=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_random_extents(
    built: Built, name: str, tokens: int, requests: int, blocks: int, rows: int, seed: int
) -> None:
    check(built, name, dims(tokens, requests, blocks, min(rows, tokens)), seed)


@pytest.mark.parametrize("name", [n for n in KERNELS if n not in ("layers.0.append_v", "logits")])
def test_one_row_alone_equals_it_among_many(built: Built, name: str) -> None:
    """Bit for bit, though the matrix unit's order of sums changes with the shape of a tile."""
    spec = built.specs[name]
    many = make_case(spec, dims(21, 2, 4, 21), seed=3)
    per_row = [i.name for i in spec.body.inputs if many.arguments[i.name].shape[0] == 21]
    whole = built.run(name, many)
    for row in (0, 13, 20):
        arguments = dict(many.arguments)
        for value in [*per_row, *(v for _, v in spec.body.outputs)]:
            arguments[value] = many.arguments[value][row : row + 1].clone()
        alone = built.run(
            name, type(many)(arguments, {**many.dims, **_one(many.dims)}, many.expected)
        )
        for _, value in spec.body.outputs:
            assert torch.equal(bits(alone[value][0]), bits(whole[value][row]))


def _one(extents: dict[str, int] | object) -> dict[str, int]:
    assert isinstance(extents, dict)
    return {name: 1 for name in ("tokens", "logit_rows") if name in extents}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
