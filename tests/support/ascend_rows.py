"""Graphs of paged rows compiled for the functional model of the Ascend 950."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from support.ascend_check import StepCheck
from support.ascend_run import printing_folder
from support.execute import stored
from support.rows import Step, pack_rows
from support.tiny import SETTINGS
from support.weights import RandomWeights
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate
from tilewright.graph import Graph
from tilewright.graph.types import BlockFormat
from tilewright.runtime.artifact import ModelRecord
from tilewright.runtime.executor import Executor
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
        name=graph.name, family="tiny", vocab_size=_vocabulary(graph),
        max_context=settings.max_context, block_size=settings.block_size,
        bos_id=None, eos_ids=(), add_bos=False, chat_template=None, tokenizer=None, config={},
    )  # fmt: skip
    job = CompileJob(
        graph, record, weights, target, toolchain, settings, first_candidate(target),
        Flags(cache=cache), jobs=2,
    )  # fmt: skip
    compile_graph(job, output, lambda *_: None)
    return weights


def _vocabulary(graph: Graph) -> int:
    logits = dict(graph.outputs).get("logits")
    return int(graph.type_of(logits).shape[-1]) if logits else 1


def fill_states(executor: Executor, graph: Graph, step: Step) -> None:
    """Allocate and fill the states of a step, packed ones from their values."""
    executor.allocate_states(
        {d: n for d, n in step.dims.items() if d in ("cache_blocks", "window_blocks")}
    )
    for state in graph.states:
        value, kind = step.states[state.name], state.type.dtype
        if isinstance(kind, BlockFormat):
            rows = pack_rows(value.flatten(0, 1).numpy(), kind)
            executor.state(state.name)[...] = rows.reshape(*value.shape[:2], -1)
        else:
            executor.state(state.name)[...] = stored(value, str(kind))


def run_step(
    executor: Executor, graph: Graph, step: Step, check: StepCheck | None = None
) -> Mapping[str, Any]:
    """Outputs of a step, with every launch shown to `check`."""
    dtypes = {i.name: str(i.type.dtype) for i in graph.inputs}
    given = {n: stored(t, dtypes[n]) for n, t in step.inputs.items()}
    if check is None:
        found = executor.run(given, dict(step.dims))
    else:
        found = executor.observe(given, dict(step.dims), check)
    return {name: np.array(value) for name, value in found.items()}


def rows_of(step: Step, graph: Graph, request: int) -> tuple[Step, Any]:
    """The step with the tokens of one request alone, and their rows in the whole step."""
    mine = step.inputs["request_rows"].numpy() == request
    mine &= step.inputs["positions"].numpy() >= 0
    chosen = np.flatnonzero(mine)
    inputs = {}
    for declared in graph.inputs:
        value = step.inputs[declared.name]
        extent = str(declared.type.shape[0])
        if declared.name == "logit_rows":
            value = value[: len(chosen)]
        elif extent == "tokens":
            value = value[chosen]
        inputs[declared.name] = value
    dims = {**step.dims, "tokens": len(chosen), "logit_rows": len(chosen)}
    return Step(inputs, dims, step.states), chosen
