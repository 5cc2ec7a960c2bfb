"""DeepSeek checkpoints under their canonical names, with what only the tokenizer can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tilewright.graph.errors import VerifyError
from tilewright.models.deepseek_config import DeepseekConfig
from tilewright.models.deepseek_names import UNREAD, Source, sources
from tilewright.models.engram import TOKEN_MAP, token_map
from tilewright.models.record import Checkpoint, TensorEntry


def adopt(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with canonical names; stacked experts become one tensor each.

    No tensor is read: a part of a stored tensor is a view of the same mapped bytes. Raises
    VerifyError as `sources` does.
    """
    stored = checkpoint.tensors
    found = sources({name: entry.shape for name, entry in stored.items()})
    tensors = {name: _part(stored[s.name], name, s) for name, s in found.items()}
    return replace(checkpoint, tensors=tensors)


def adopt_with_engram(checkpoint: Checkpoint) -> Checkpoint:
    """Do as `adopt`; add the map of compressed token ids and the compressed id of padding."""
    checkpoint = adopt(checkpoint)
    text = _text(checkpoint.config)
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
            f"config 'engram_compressed_vocab_size': does not fit the tokenizer: got {expected}, "
            f"want {count} ({checkpoint.source})"
        )
    size, pad = text.get("vocab_size"), text.get("engram_pad_token_id", 2)
    if type(size) is not int or type(pad) is not int or not 0 <= pad < len(ids) <= size:
        raise VerifyError(
            f"config 'engram_pad_token_id': got {pad!r}, want a token of the tokenizer's "
            f"{len(ids)}, at most vocab_size {size!r} ({checkpoint.source})"
        )
    padded = [*ids, *[ids[pad]] * (size - len(ids))]
    entry = _int_entry(TOKEN_MAP, np.array(padded, np.int32)[:, None], checkpoint.source)
    return replace(
        checkpoint,
        config={**checkpoint.config, "engram_compressed_pad_id": ids[pad]},
        tensors={**checkpoint.tensors, TOKEN_MAP: entry},
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, **(config.get("text_config") or {})}


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
