"""Qwen2: Llama with biases on the query, key and value projections (Yang et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilewright.graph.errors import VerifyError
from tilewright.models import llama


def read_config(config: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Qwen2 configuration; raise VerifyError for the parts that are not built here."""
    if config.get("use_sliding_window"):
        raise VerifyError("config 'use_sliding_window': not supported: got true, want false")
    return dataclasses.replace(llama.read_config(config), attention_bias=True, output_bias=False)
