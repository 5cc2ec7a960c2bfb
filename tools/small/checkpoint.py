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
    write_settings(folder, config, tokenizer)
    _write_json(folder / "training.json", record)


def write_settings(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Write what stands beside the tensors: config.json and the tokenizer's two files."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
