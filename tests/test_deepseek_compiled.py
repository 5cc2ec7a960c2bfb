"""Both DeepSeek families compiled for the CPU, against logits of independent implementations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.deepseek_tiny import V4, V41, drawn_tensors
from support.paged_run import PagedRun, graph_weights
from support.tiny import SETTINGS, quick_target
from support.toolchain import QuickToolchain
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.pack_cpu import Unpacked
from tilewright.codegen.plan import first_candidate
from tilewright.graph import Graph, reference
from tilewright.graph.types import F32, ElementType
from tilewright.models.engram import TOKEN_MAP
from tilewright.models.layers import Formats, Limits
from tilewright.models.registry import family_of
from tilewright.runtime.artifact import ModelRecord
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.devices.cpu import CpuDevice
from tilewright.runtime.executor import Executor

pytestmark = pytest.mark.slow
LIMITS = Limits(max_tokens=160, max_requests=4, max_logit_rows=160, max_context=512,
                context_page=128, window_page=16)
CASES: dict[str, tuple[Any, int, int]] = {"v4": (V4, 5, 128), "v41": (V41, 50, 12)}


@dataclass(frozen=True)
class Plain:
    """Unquantised tensors by name."""

    tensors: dict[str, torch.Tensor]

    def unpacked(self, name: str, dtype: ElementType) -> Unpacked:
        return Unpacked(values=self.tensors[name].numpy())


def graph_of(config: Any) -> Graph:
    family = family_of(config)
    formats = Formats({}, F32, quantise_cache=False)
    return family.build("tiny", family.read_config(config), formats, LIMITS)


def compiled(graph: Graph, tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    chip, cache = quick_target(), folder / "cache"
    record = ModelRecord(
        name="tiny", family="tiny", vocab_size=67, max_context=512, block_size=128, bos_id=None,
        eos_ids=(), add_bos=False, chat_template=None, tokenizer=None, config={},
    )  # fmt: skip
    settings = replace(SETTINGS, max_tokens_per_step=160, max_context=512)
    job = CompileJob(
        graph, record, Plain(tensors), chip, QuickToolchain(chip, cache), settings,
        first_candidate(chip), Flags(cache=cache), jobs=2,
    )  # fmt: skip
    compile_graph(job, folder / "artifact", lambda *_: None)
    return folder / "artifact"


@pytest.mark.parametrize("family", CASES)
def test_logits_equal_the_stored_ones_whole_and_in_steps(family: str, tmp_path: Path) -> None:
    config, ids_below, window = CASES[family]
    stored = np.load(Path(__file__).parent / "data" / f"deepseek_golden_{family}.npz")
    tensors = drawn_tensors(graph_of(config), int(stored["seed"]), ids_below=ids_below)
    if family == "v41":
        config = {**config, "engram_compressed_pad_id": int(tensors[TOKEN_MAP][2, 0])}
    graph, tokens = graph_of(config), stored["tokens"].tolist()
    pages = PagedRun(graph, graph_weights(graph, tensors), reference.IDEAL_F32, context_page=128,
                     window_page=16, max_step=160, window=window)
    path = compiled(graph, tensors, tmp_path)
    for sizes in ((len(tokens),), (31, 1, len(tokens) - 40, 1, 7)):
        got = run_steps(path, pages, tokens, sizes)
        np.testing.assert_allclose(got, stored["logits"], atol=1e-3, rtol=0)


def run_steps(path: Path, pages: PagedRun, tokens: list[int], sizes: tuple[int, ...]) -> Any:
    """Logits of a text fed in steps of these sizes."""
    tables = {"block_tables": pages.block_tables.numpy(),
              "window_tables": pages.window_tables.numpy()}
    held = {"cache_blocks": tables["block_tables"].size + 1,
            "window_blocks": tables["window_tables"].size + 1}
    found, start = [], 0
    with Executor(load_artifact(path), CpuDevice(2), poison=True) as executor:
        executor.allocate_states(held)
        for n in sizes:
            given = {
                "token_ids": tokens[start : start + n], "positions": range(start, start + n),
                "request_rows": [0] * n, "logit_rows": range(n),
            }  # fmt: skip
            inputs = {k: np.array(list(v), np.int32) for k, v in given.items()} | tables
            dims = {"tokens": n, "requests": 1, "logit_rows": n, **held,
                    "request_blocks": tables["block_tables"].shape[1],
                    "request_window_blocks": tables["window_tables"].shape[1]}
            found.append(np.array(executor.run(inputs, dims)["logits"]))
            start += n
    return np.concatenate(found)
