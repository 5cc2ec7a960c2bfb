"""Write a checkpoint in the released V4.1 form: config.json, safetensors, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tilewright.tools.small.weights import released_tensors


def write_checkpoint(
    folder: Path,
    masters: Mapping[str, torch.Tensor],
    stored: Mapping[str, str],
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    record: Mapping[str, Any],
) -> None:
    """Write the model's files; `record` of the training goes to training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.contiguous() for name, t in released_tensors(masters, stored)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in (
        ("config.json", config), ("tokenizer_config.json", settings), ("training.json", record),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
