"""DeepSeek checkpoints under their canonical names, with what only the tokenizer can tell."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tilewright.graph.errors import VerifyError
from tilewright.models.deepseek_config import DeepseekConfig, weight_block
from tilewright.models.deepseek_names import UNREAD, Source, sources
from tilewright.models.engram import TOKEN_MAP, token_map
from tilewright.models.llama import positive
from tilewright.models.record import Checkpoint, TensorEntry, shown
from tilewright.models.settings import text_settings

_EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.")
_BY_TOKEN = "layers.*.ffn.gate.tid2eid"  # the experts of every token id, in hash layers
_BY_ROWS = "*.engram.embed.weight"  # a table of rows, each with scales of its own


def adopt(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with canonical names; stacked experts become one tensor each.

    No tensor is read: a part of a stored tensor is a view of the same mapped bytes. Raises
    VerifyError as `sources` does.
    """
    stored = checkpoint.tensors
    found = sources({name: entry.shape for name, entry in stored.items()})
    tensors = {name: _part(stored[s.name], name, s) for name, s in found.items()}
    text = text_settings(checkpoint.config)
    _check_experts(checkpoint, text, tensors)
    _check_blocks(text, tensors)
    tables = [name for name in tensors if fnmatchcase(name, _BY_TOKEN)]
    tensors |= {name: _expert_ids(tensors[name], text) for name in tables}
    return replace(checkpoint, tensors=tensors)


def _check_experts(
    checkpoint: Checkpoint, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> None:
    """Check that every layer stores as many experts as the configuration says."""
    wanted, experts = config.get("n_routed_experts"), defaultdict[int, set[int]](set)
    for name in tensors:
        found = _EXPERT.match(name)
        if found:
            experts[int(found[1])].add(int(found[2]))
    for layer, ids in experts.items():
        if ids != set(range(len(ids))) or len(ids) != wanted:
            lost = next(i for i in range(len(ids) + 1) if i not in ids)
            raise VerifyError(
                f"config 'n_routed_experts': does not match the tensors of layer {layer}: got "
                f"{shown(wanted)}, and {len(ids)} experts are stored, 'layers.{layer}.ffn.experts."
                f"{lost}' not among them ({checkpoint.source})"
            )


def _check_blocks(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> None:
    """Check that the scales of fp8 matrices have the block size that the configuration says."""
    block = weight_block(config)
    for name, entry in tensors.items():
        plain = entry.scale is None or not entry.dtype.startswith("fp8")
        if block is None or plain or fnmatchcase(name, _BY_ROWS):
            continue
        assert entry.scale is not None
        n, k = entry.shape
        want = (-(-n // block[0]), -(-k // block[1]))
        if entry.scale.shape != want:
            raise VerifyError(
                f"{entry.scale.where}: does not fit config 'weight_block_size' {list(block)}: got "
                f"{list(entry.scale.shape)}, want {list(want)} for a weight of {[n, k]}"
            )


def _expert_ids(entry: TensorEntry, config: Mapping[str, Any]) -> TensorEntry:
    """Return a table of expert numbers, whose values are checked where they are read."""
    if entry.dtype not in ("i32", "i64"):
        raise VerifyError(
            f"{entry.where}: holds numbers of experts: got {entry.dtype}, want i32 or i64"
        )
    return replace(entry, below=positive(config, "n_routed_experts"))


def adopt_with_engram(checkpoint: Checkpoint) -> Checkpoint:
    """Do as `adopt`; add the map of compressed token ids and the compressed id of padding."""
    checkpoint = adopt(checkpoint)
    text = text_settings(checkpoint.config)
    if not text.get("engram_layer_ids"):
        return checkpoint
    if checkpoint.tokenizer_json is None:
        raise VerifyError(
            f"checkpoint '{checkpoint.name}': Engram hashes texts of tokens: got no "
            f"tokenizer.json, want one ({checkpoint.source})"
        )
    ids, count = token_map(Tokenizer.from_str(checkpoint.tokenizer_json))
    expected = text.get("engram_compressed_vocab_size")
    if count != expected:
        raise VerifyError(
            f"config 'engram_compressed_vocab_size': does not fit the tokenizer: got "
            f"{shown(expected)}, "
            f"want {count} ({checkpoint.source})"
        )
    size, pad = _vocab_size(checkpoint, text, len(ids)), text.get("engram_pad_token_id", 2)
    if type(pad) is not int or not 0 <= pad < len(ids):
        raise VerifyError(
            f"config 'engram_pad_token_id': got {shown(pad)}, want a token of the tokenizer's "
            f"{len(ids)} ({checkpoint.source})"
        )
    padded = [*ids, *[ids[pad]] * (size - len(ids))]
    entry = _int_entry(TOKEN_MAP, np.array(padded, np.int32)[:, None], checkpoint.source)
    return replace(
        checkpoint,
        config={**checkpoint.config, "engram_compressed_pad_id": ids[pad]},
        tensors={**checkpoint.tensors, TOKEN_MAP: entry},
    )


def _vocab_size(checkpoint: Checkpoint, config: Mapping[str, Any], num_tokens: int) -> int:
    """Return the size of the vocabulary, which tables are made of, once its rows are there."""
    size, table = positive(config, "vocab_size"), checkpoint.tensors.get("embed.weight")
    rows = table.shape[0] if table is not None and table.shape else num_tokens
    if not num_tokens <= size <= max(rows, num_tokens):
        raise VerifyError(
            f"config 'vocab_size': got {size}, want {rows}, the rows of 'embed.weight', and at "
            f"least the tokenizer's {num_tokens} tokens ({checkpoint.source})"
        )
    return size


def _part(entry: TensorEntry, name: str, source: Source) -> TensorEntry:
    """The stored tensor, or a block of its rows, under another name."""
    if source.rows is None:
        return replace(entry, name=name)
    total = int(np.prod(entry.shape[:-1]))
    row = entry.num_bytes // total
    return replace(
        entry,
        name=name,
        shape=source.shape,
        offset=entry.offset + source.start * row,
        num_bytes=source.rows * row,
    )


def _int_entry(name: str, values: np.ndarray[Any, np.dtype[np.int32]], path: Path) -> TensorEntry:
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return TensorEntry(name, "i32", values.shape, path, 0, raw.size, raw)


def unread(c: DeepseekConfig) -> tuple[str, ...]:
    """Patterns of tensors that the text model may have besides: other parts, other layers."""
    first, last = c.layers
    others = [f"layers.{i}.*" for i in range(c.num_layers) if not first <= i < last]
    return (*UNREAD, *others)


def with_layers(c: DeepseekConfig, first: int, last: int) -> DeepseekConfig:
    """Return the configuration that builds layers first..last-1 alone.

    Raises VerifyError for an empty slice, or one beyond the layers.
    """
    if not 0 <= first < last <= c.num_layers:
        raise VerifyError(
            f"setting 'layers': got {first}:{last}, want a slice within 0:{c.num_layers}"
        )
    return replace(c, layers=(first, last))
