"""Artifacts of the tiny model for the Ascend target."""

from __future__ import annotations

from pathlib import Path

from support.ascend_run import printing_folder
from support.tiny import Tiny
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate
from tilewright.targets.ascend950.target import ascend950_target
from tilewright.targets.ascend950.toolchain import AscendToolchain

SETTINGS = CompileConfig(
    max_context=64, max_tokens_per_step=40, max_requests=8, block_size=8, dtype="bfloat16"
)


def compile_for(variant: str, model: Tiny, output: Path, cache: Path) -> None:
    target = ascend950_target(variant)
    toolchain = AscendToolchain(target, folder=printing_folder(cache))
    job = CompileJob(
        model.graph, model.record(), model.weights, target, toolchain, model.settings,
        first_candidate(target), Flags(cache=cache), jobs=2,
    )  # fmt: skip
    compile_graph(job, output, lambda *_: None)
