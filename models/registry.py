"""The table of model families: one row each, keyed by the architecture a checkpoint names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tilewright.graph import Graph
from tilewright.graph.errors import VerifyError
from tilewright.models import (
    deepseek_checkpoint,
    deepseek_v4,
    deepseek_v41,
    llama,
    mistral,
    qwen2,
    qwen3,
)
from tilewright.models.layers import Formats, Limits
from tilewright.models.record import Checkpoint, shown


class ModelConfig(Protocol):
    """What every family's configuration says."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...


def _unchanged(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


def _none(config: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Family:
    """How a family reads its configuration and builds its graph.

    `adopt` gives a checkpoint's tensors the names the graph uses; `unread` lists patterns of
    tensors that may be there besides. `paged`: states are rows of two pools (paged_step.py).
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    build: Callable[[str, Any, Formats, Limits], Graph]  # takes what read_config returns
    adopt: Callable[[Checkpoint], Checkpoint] = _unchanged
    unread: Callable[[Any], tuple[str, ...]] = _none
    paged: bool = False


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", llama.read_config, llama.build),
    "MistralForCausalLM": Family("mistral", mistral.read_config, llama.build),
    "Qwen2ForCausalLM": Family("qwen2", qwen2.read_config, llama.build),
    "Qwen3ForCausalLM": Family("qwen3", qwen3.read_config, qwen3.build),
    "DeepseekV4ForCausalLM": Family(
        "deepseek_v4",
        deepseek_v4.read_config,
        deepseek_v4.build,
        adopt=deepseek_checkpoint.adopt,
        unread=deepseek_checkpoint.unread,
        paged=True,
    ),
    "DeepseekV41ForCausalLM": Family(
        "deepseek_v41",
        deepseek_v41.read_config,
        deepseek_v41.build,
        adopt=deepseek_checkpoint.adopt_with_engram,
        unread=deepseek_checkpoint.unread,
        paged=True,
    ),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family a configuration names; raise VerifyError listing the known ones."""
    names = config.get("architectures")
    names = [] if names is None else names
    if not isinstance(names, list):
        raise VerifyError(f"config 'architectures': got {shown(names)}, want a list of names")
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    known = ", ".join(FAMILIES)
    raise VerifyError(f"model architecture {shown(names)}: not supported: have {known}")
