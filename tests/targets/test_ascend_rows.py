"""Row kernels of other models and long rows on the functional model, in both orders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.ascend_run import Built, build, printing_folder, specs_of
from support.kernel_case import distinct_bodies, errors, make_case
from support.tiny import tiny_graph
from tilewright.codegen.config import CompileConfig
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.types import F32
from tilewright.targets.ascend950.target import ascend950_target
from tilewright.targets.ascend950.toolchain import AscendToolchain

pytestmark = pytest.mark.cpu
SETTINGS = CompileConfig(
    max_context=64, max_tokens_per_step=40, max_requests=8, block_size=8, dtype="bfloat16"
)
TARGET = ascend950_target("950-4+model")
LONG = 40001  # more than two parts, and no multiple of anything


def long_argmax() -> Graph:
    b = GraphBuilder("long")
    rows = b.dim("tokens", Role.BATCH, upper=64)
    b.output("best", b.op("argmax", b.input("x", F32, rows, LONG)))
    return b.build()


def graphs() -> dict[str, Graph]:
    return {
        "qk_norm": tiny_graph("bf16", settings=SETTINGS, family="Qwen3ForCausalLM"),
        "interleaved": tiny_graph("bf16", settings=SETTINGS, rope_pairing="interleaved"),
        "wide_cache": tiny_graph("bf16", settings=SETTINGS, head_dim=32),
        "long": long_argmax(),
    }


@pytest.fixture(scope="module")
def built(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    bodies = {}
    for name, graph in graphs().items():
        for group, kind, body in distinct_bodies(graph):
            if kind != "contract":
                bodies[body.graph.digest] = (f"{name}:{group}", kind, body)
    toolchain = AscendToolchain(TARGET, folder=printing_folder(kernel_cache))
    specs = specs_of(list(bodies.values()), TARGET)
    return build(specs, TARGET, toolchain, kernel_cache, tmp_path_factory.mktemp("rows"))


EXTENTS = {"tokens": 13, "requests": 2, "request_blocks": 5, "cache_blocks": 15, "logit_rows": 3}


@pytest.mark.parametrize("adversarial", [False, True])
def test_rows_and_attention_of_other_models(built: Built, adversarial: bool) -> None:
    assert len(built.specs) >= 8
    for name, spec in built.specs.items():
        case = make_case(spec, EXTENTS, seed=4, padded=2)
        got = built.run(name, case, adversarial=adversarial)
        for value, error in errors(case, got):
            exact = not got[value].is_floating_point()
            limit = 0.0 if exact else 2.0**-7 if got[value].dtype == torch.bfloat16 else 3e-4
            assert error <= limit, f"{name} {value}: {error}"


def test_argmax_of_long_rows(built: Built) -> None:
    """Ties go to the first; a row with NaN gives 0; places in every part are found."""
    name = next(n for n in built.specs if n.startswith("long:"))
    case = make_case(built.specs[name], {"tokens": 6}, seed=5)
    x = case.arguments["x0"]
    x[0, 39999], x[1, 16384], x[2, 0] = 50.0, 50.0, 50.0
    x[3, [20000, 20001, 7]] = 60.0
    x[4, 33000] = float("nan")
    x[5] = float("-inf")
    for adversarial in (False, True):
        got = built.run(name, case, adversarial=adversarial)["v0"]
        assert got.tolist() == [39999, 16384, 0, 7, 0, 0]
