"""Qwen3: Llama with RMSNorm on every query and key head before rotation (Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.graph import Graph, Value
from tilewright.models import llama
from tilewright.models.layers import Formats, LayerWeights, Limits


def read_config(config: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Qwen3 configuration; raise VerifyError for the parts that are not built here."""
    return llama.read_config({"use_sliding_window": False, **config})


def build(name: str, c: llama.LlamaConfig, formats: Formats, limits: Limits) -> Graph:
    """Return the graph of one step of the decoder."""

    def normed(w: LayerWeights, x: Value, part: str) -> Value:
        scale = w.vector(f"self_attn.{part}_norm", c.attention.width)
        return w.b.rms_norm(x, scale, eps=c.rms_norm_eps, name=f"{part}_norm")

    return llama.build(name, c, formats, limits, refine=normed)
