"""`tilewright check` on compiled DeepSeek models: both families, in released storage formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.deepseek import LIMITS, v4_graph, v41_graph
from support.tiny import SETTINGS, quick_target
from support.toolchain import QuickToolchain
from support.weights import RandomWeights
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate
from tilewright.graph import Graph
from tilewright.runtime.artifact import ModelRecord

from .conftest import Call

pytestmark = [pytest.mark.cpu, pytest.mark.slow]
GRAPHS = {"v4": lambda: v4_graph((0, 4, 128)), "v41": lambda: v41_graph("wfrxcrx")}


def compiled(graph: Graph, folder: Path, cache: Path) -> Path:
    chip = quick_target()
    record = ModelRecord(
        name=graph.name, family="tiny", vocab_size=61, max_context=LIMITS.max_context,
        block_size=LIMITS.context_page, bos_id=None, eos_ids=(), add_bos=False,
        chat_template=None, tokenizer=None, config={},
    )  # fmt: skip
    settings = replace(
        SETTINGS, max_tokens_per_step=LIMITS.max_tokens, max_context=LIMITS.max_context,
        dtype="bfloat16",
    )  # fmt: skip
    job = CompileJob(
        graph, record, RandomWeights(graph, seed=4), chip, QuickToolchain(chip, cache), settings,
        first_candidate(chip), Flags(cache=cache), jobs=2,
    )  # fmt: skip
    compile_graph(job, folder / "artifact", lambda *_: None)
    return folder / "artifact"


@pytest.mark.parametrize("family", GRAPHS)
def test_every_kernel_of_a_deepseek_model_is_within(
    family: str, call: Call, tmp_path: Path, kernel_cache: Path
) -> None:
    path = compiled(GRAPHS[family](), tmp_path, kernel_cache)
    done = call("check", path, "--json")
    found = json.loads(done.out)
    wrong = [k for k in found["kernels"] if not k["is_within"]]
    assert (done.code, wrong) == (0, []), done.err
    names = {k["kernel"].partition("_")[0] for k in found["kernels"]}
    assert {"contract", "latent", "row", "select"} <= names
