"""Graphs of paged rows compiled for the functional model of the Ascend 950."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.ascend_run import printing_folder
from support.tiny import SETTINGS
from support.weights import RandomWeights
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate
from tilewright.graph import Graph
from tilewright.runtime.artifact import ModelRecord
from tilewright.targets.ascend950.target import ascend950_target
from tilewright.targets.ascend950.toolchain import AscendToolchain

TARGET = ascend950_target("950-4+model")


def compile_paged(graph: Graph, output: Path, cache: Path, rows: int) -> RandomWeights:
    """Compile for steps of up to `rows` tokens; return the weights."""
    target = replace(TARGET, buckets=(rows, rows))
    toolchain = AscendToolchain(target, folder=printing_folder(cache))
    weights = RandomWeights(graph)
    settings = replace(SETTINGS, max_tokens_per_step=rows, dtype="bfloat16")
    record = ModelRecord(
        name=graph.name, family="tiny", vocab_size=1, max_context=settings.max_context,
        block_size=settings.block_size, bos_id=None, eos_ids=(), add_bos=False,
        chat_template=None, tokenizer=None, config={},
    )  # fmt: skip
    job = CompileJob(
        graph, record, weights, target, toolchain, settings, first_candidate(target),
        Flags(cache=cache), jobs=2,
    )  # fmt: skip
    compile_graph(job, output, lambda *_: None)
    return weights
