"""Mistral: Llama whose layers may see a window of the last positions only (Jiang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.models import llama

DEFAULT_WINDOW = 4096  # of files that say nothing; null says that there is none


def read_config(config: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Mistral configuration; raise VerifyError for the parts that are not built here."""
    return llama.read_config({"sliding_window": DEFAULT_WINDOW, **config})
