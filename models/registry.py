"""The table of model families: one row each, keyed by the architecture a checkpoint names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.graph import Graph
from tilewright.graph.errors import VerifyError
from tilewright.models import llama, qwen2, qwen3
from tilewright.models.layers import Formats, Limits


@dataclass(frozen=True)
class Family:
    """How a family reads its configuration and builds its graph."""

    name: str
    read_config: Callable[[Mapping[str, Any]], llama.LlamaConfig]
    build: Callable[[str, llama.LlamaConfig, Formats, Limits], Graph]


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", llama.read_config, llama.build),
    "MistralForCausalLM": Family("llama", llama.read_config, llama.build),
    "Qwen2ForCausalLM": Family("qwen2", qwen2.read_config, llama.build),
    "Qwen3ForCausalLM": Family("qwen3", qwen3.read_config, qwen3.build),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family a configuration names; raise VerifyError listing the known ones."""
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if name in FAMILIES:
            return FAMILIES[name]
    raise VerifyError(f"model architecture {names!r}: not supported: have {', '.join(FAMILIES)}")
