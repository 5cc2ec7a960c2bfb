"""Tiny models and artifacts: a decoder of two layers, random weights, compiled in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.toolchain import QuickToolchain
from support.weights import RandomWeights
from tilewright.codegen.compile import CompileJob, CompileReport, compile_graph
from tilewright.codegen.config import DTYPES, CompileConfig
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import Chooser, first_candidate
from tilewright.codegen.target import Target
from tilewright.graph import Graph
from tilewright.graph.types import F32, ElementType, dtype, element_type
from tilewright.models.layers import Formats, Limits
from tilewright.models.registry import FAMILIES
from tilewright.runtime.artifact import ModelRecord
from tilewright.targets.registry import resolve

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 67, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "max_position_embeddings": 256,
}  # fmt: skip
SETTINGS = CompileConfig(
    max_context=256, max_tokens_per_step=24, max_requests=24, block_size=8, dtype="float32"
)
QUANTISED = {
    "q4_1": "q4_1[g=32,axis=1,scale=f16]", "q8_0": "q8_0[g=32,axis=1,scale=f16]",
    "fp8": "fp8_e4m3[block=32x32,scale=ue8m0]", "fp8_128": "fp8_e4m3[block=128x128,scale=ue8m0]",
    "fp4": "fp4_e2m1[g=32,axis=1,scale=ue8m0]",
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A model graph, its weights, and how it is to be compiled."""

    graph: Graph
    weights: RandomWeights
    settings: CompileConfig
    config: Mapping[str, Any]

    def record(self) -> ModelRecord:
        return ModelRecord(
            name=self.graph.name, family="tiny", vocab_size=int(self.config.get("vocab_size", 1)),
            max_context=self.settings.max_context, block_size=self.settings.block_size,
            bos_id=None, eos_ids=(), add_bos=False, chat_template=None, tokenizer=None, config={},
        )  # fmt: skip


def quick_target(buckets: tuple[int, ...] = (1, 4)) -> Target:
    """The best variant of this machine, with few buckets."""
    return replace(resolve("cpu")[0], buckets=buckets)


def tiny_graph(
    stored: str = "f32",
    *,
    settings: CompileConfig = SETTINGS,
    family: str = "LlamaForCausalLM",
    **changes: Any,
) -> Graph:
    """A decoder whose matrices are stored as `stored` and whose vectors are fp32."""
    config = {**CONFIG, "architectures": [family], **changes}
    row = FAMILIES[family]
    read = row.read_config(config)
    limits = Limits(
        max_tokens=settings.max_tokens_per_step, max_requests=settings.max_requests,
        max_logit_rows=settings.max_tokens_per_step, max_context=settings.max_context,
        block_size=settings.block_size,
    )  # fmt: skip
    activation = dtype(DTYPES[settings.dtype])
    plain = row.build("tiny", read, Formats({}, activation), limits)
    matrix = element_type(QUANTISED.get(stored, stored))
    formats: dict[str, ElementType] = {
        w.name: matrix if w.type.rank == 2 else F32 for w in plain.weights
    }
    return row.build("tiny", read, Formats(formats, activation), limits)


def tiny(
    stored: str = "f32", *, settings: CompileConfig = SETTINGS, seed: int = 0, **changes: Any
) -> Tiny:
    """A tiny decoder with random weights; `changes` replace entries of its configuration."""
    graph = tiny_graph(stored, settings=settings, **changes)
    return Tiny(graph, RandomWeights(graph, seed=seed), settings, {**CONFIG, **changes})


def build(
    model: Tiny,
    output: Path,
    cache: Path,
    *,
    target: Target | None = None,
    choose: Chooser | None = None,
) -> CompileReport:
    """Compile into `output`, with kernels kept in `cache`."""
    chip = target or quick_target()
    job = CompileJob(
        model.graph, model.record(), model.weights, chip, QuickToolchain(chip, cache),
        model.settings, choose or first_candidate(chip), Flags(cache=cache), jobs=2,
    )  # fmt: skip
    return compile_graph(job, output, lambda *_: None)


def step_inputs(
    tokens: list[int], *, block_size: int, start: int = 0
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, int]]:
    """Inputs and dims of one step that holds one request alone, all rows wanted."""
    n, blocks = len(tokens), -(-(start + len(tokens)) // block_size)
    positions = np.arange(start, start + n, dtype=np.int32)
    inputs = {
        "token_ids": np.array(tokens, np.int32),
        "positions": positions,
        "request_rows": np.zeros(n, np.int32),
        "slots": positions.copy(),
        "block_tables": np.arange(blocks, dtype=np.int32)[None],
        "logit_rows": np.arange(n, dtype=np.int32),
    }
    return inputs, {"tokens": n, "requests": 1, "logit_rows": n, "request_blocks": blocks}


def zero_states(graph: Graph, cache_blocks: int) -> dict[str, torch.Tensor]:
    """Empty caches for the reference."""
    return {
        s.name: torch.zeros([cache_blocks, *(int(d) for d in s.type.shape[1:])])
        for s in graph.states
    }
