"""Qwen2: Llama with biases on the query, key and value projections (Yang et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilewright.models import llama


def read_config(config: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Qwen2 configuration; raise VerifyError for the parts that are not built here."""
    read = llama.read_config({"use_sliding_window": False, **config})
    return dataclasses.replace(read, attention_bias=True, output_bias=False)
