"""From what a user names (a folder, a GGUF file, a packaged model) to a graph and its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.codegen.config import DEFAULT_REPLAY, DTYPES, CompileConfig
from tilewright.codegen.pack_cpu import Unpacked
from tilewright.graph import Graph
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import BF16, F32, DType, ElementType, dtype, element_type
from tilewright.models import quants
from tilewright.models.checkpoint import (
    Checkpoint,
    Generation,
    TensorEntry,
    account,
    open_checkpoint,
)
from tilewright.models.deepseek_checkpoint import with_layers
from tilewright.models.known_config import open_config, released_formats
from tilewright.models.layers import Formats, Limits
from tilewright.models.record import shown
from tilewright.models.registry import Family, family_of
from tilewright.models.scales import read_rows, read_scaled
from tilewright.models.settings import text_settings
from tilewright.models.tokenizer import check_tokenizer
from tilewright.runtime.artifact import ModelRecord
from tilewright.tools.template_check import check_template

TOKENIZER = "tokenizer.json"
_STORED = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "q8_0": "q8_0[g=32,axis=1,scale=f16]",
    "q4_0": "q4_1[g=32,axis=1,scale=f16]",
    "q4_1": "q4_1[g=32,axis=1,scale=f16]",
    "q6_k": "q8_g16[g=16,axis=1,scale=f32]",
    "i32": "i32",
    "i64": "i32",
}
_DECLARED = (None, "float32", "bfloat16", "float16")
_INTS = {"i32": np.int32, "i64": np.int64}
_UNREAD = ("*.rotary_emb.inv_freq", "rope_freqs.weight")


@dataclass(frozen=True)
class Prepared:
    """A model ready to be compiled."""

    graph: Graph
    weights: CheckpointWeights
    model: ModelRecord
    files: Mapping[str, bytes]
    config: CompileConfig
    checkpoint: Checkpoint


@dataclass(frozen=True)
class CheckpointWeights:
    """Tensors of a checkpoint, as the packer asks for them."""

    checkpoint: Checkpoint

    def unpacked(self, name: str, wanted: ElementType) -> Unpacked:
        """Return a tensor's codes and scales, or its values rounded to a plain dtype.

        Raises VerifyError for a NaN, which would spoil answers without a word.
        """
        entry = self.checkpoint.tensors[name]
        found = self._found(entry, wanted)
        if any(holds_nan(part) for part in (found.values, found.d, found.m)):
            raise VerifyError(f"{entry.where}: holds NaN: want numbers")
        return found

    def _found(self, entry: TensorEntry, wanted: ElementType) -> Unpacked:
        raw, shape = entry.raw(), entry.shape
        if entry.scale is not None:
            floats, exponents = read_scaled(entry)
            return Unpacked(codes=floats, d=exponents)
        match entry.dtype:
            case "q4_1":
                codes, d, m = quants.unpack_q4_1(raw, shape)
                return Unpacked(codes=codes, d=d, m=m)
            case "q4_0":
                codes, d = quants.unpack_q4_0(raw, shape)
                return Unpacked(codes=codes, d=d, m=(d * np.float16(-8)).astype(np.float16))
            case "q8_0":
                signed, d = quants.unpack_q8_0(raw, shape)
                return Unpacked(codes=signed, d=d)
            case "q6_k":
                signed, scale = quants.unpack_q6_k(raw, shape)
                return Unpacked(codes=signed, d=scale)
        if entry.dtype in _INTS:
            return Unpacked(values=_int32(entry))
        if wanted.name == entry.dtype == "bf16":
            return Unpacked(values=raw.view(np.uint16).reshape(shape))
        if wanted.name == entry.dtype == "f16":
            return Unpacked(values=raw.view(np.float16).reshape(shape))
        values = entry.dequantise()
        return Unpacked(values=round_bf16(values) if wanted == BF16 else values)

    def pieces(self, name: str, wanted: ElementType) -> Iterator[Unpacked]:
        """Yield codes and scales of a table of rows."""
        for codes, d in read_rows(self.checkpoint.tensors[name]):
            yield Unpacked(codes=codes, d=d)


def holds_nan(part: np.ndarray[Any, Any] | None) -> bool:
    """Say whether there is a NaN among floats, or among the bits of bf16."""
    if part is None or not part.size:
        return False
    if part.dtype == np.uint16:
        return int((part & np.uint16(0x7FFF)).max()) > 0x7F80
    return part.dtype.kind == "f" and bool(np.isnan(part.max()))


def round_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bits of fp32 values rounded to bf16, ties to even; a NaN stays one."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()


def _int32(entry: TensorEntry) -> np.ndarray[Any, Any]:
    """Return a tensor of whole numbers as int32; raise VerifyError if one does not fit."""
    values = entry.raw().view(_INTS[entry.dtype]).reshape(entry.shape)
    low, high = (-(1 << 31), 1 << 31) if entry.below is None else (0, entry.below)
    if values.size and not low <= values.min() <= values.max() < high:
        raise VerifyError(
            f"{entry.where}: holds numbers out of range: got {values.min()} to {values.max()}, "
            f"want {low} to {high - 1}"
        )
    return values.astype(np.int32)


def prepare(
    model: str, config: CompileConfig, *, dtype_name: str = "auto", max_context: int | None = None
) -> Prepared:
    """Open a model and build its graph; raise VerifyError naming the tensor or key that does not
    fit.

    `dtype_name` is auto, float32 or bfloat16: what activations and the cache are rounded to.
    """
    checkpoint = open_checkpoint(model)
    family = family_of(checkpoint.config)
    checkpoint = family.adopt(checkpoint)
    read, config = settled(family, checkpoint.config, config, dtype_name, max_context)
    check_tokenizer(checkpoint, read.vocab_size)
    check_template(checkpoint)
    stored = _formats(checkpoint, dtype(DTYPES[config.dtype]))
    graph = build_graph(checkpoint.name, family, read, stored, config)
    _account(graph, checkpoint, family.unread(read))
    record = _model_record(checkpoint, family.name, read.vocab_size, config)
    files = {TOKENIZER: checkpoint.tokenizer_json.encode()} if checkpoint.tokenizer_json else {}
    return Prepared(graph, CheckpointWeights(checkpoint), record, files, config, checkpoint)


def prepare_config(
    name: str, config: CompileConfig, *, dtype_name: str = "auto", max_context: int | None = None
) -> Prepared:
    """Build the graph of a configuration that has no weights, stored as a release would.

    Raises VerifyError for an unknown name or a key that does not fit.
    """
    name, found = open_config(name)
    family = family_of(found)
    read, config = settled(family, found, config, dtype_name, max_context)
    plain = build_graph(name, family, read, {}, config)
    stored = released_formats(found, plain, dtype(DTYPES[config.dtype]))
    graph = build_graph(name, family, read, stored, config)
    empty = Checkpoint(
        name, Path(name), found, {}, tokenizer_json=None, chat_template=None,
        generation=Generation(bos_id=None, eos_ids=(), add_bos=False),
    )  # fmt: skip
    record = _model_record(empty, family.name, read.vocab_size, config)
    return Prepared(graph, CheckpointWeights(empty), record, {}, config, empty)


def settled(
    family: Family, found: Mapping[str, Any], config: CompileConfig, dtype_name: str,
    max_context: int | None,
) -> tuple[Any, CompileConfig]:  # fmt: skip
    """Read a model's configuration, and fill in what it decides of a compilation's.

    Raises VerifyError for a setting that the family does not have.
    """
    read: Any = family.read_config(found)
    config = replace(
        config,
        dtype=_activation(dtype_name, found),
        max_context=_context(max_context, read.max_context),
        block_size=Limits().context_page if family.paged else config.block_size,
    )
    for setting, asked, key in (
        ("layers", config.layers is not None, "layers"),
        ("quantise_cache", not config.quantise_cache, "group"),
        ("replay_tokens", config.replay_tokens is not None, "replay_tokens"),
    ):
        if asked and not hasattr(read, key):
            raise VerifyError(f"setting '{setting}': the family '{family.name}' has none")
    if config.layer_range is not None:
        read = with_layers(read, *config.layer_range)
    if config.replay_tokens == DEFAULT_REPLAY:
        config = replace(config, replay_tokens=read.default_replay)
    if config.replay_tokens is not None:
        read = replace(read, replay_tokens=config.replay_tokens)
    return read, config


def build_graph(
    name: str, family: Family, read: Any, stored: Mapping[str, ElementType], config: CompileConfig
) -> Graph:
    """Build a family's graph with the settings of a compilation."""
    activation = dtype(DTYPES[config.dtype])
    formats = Formats(stored, activation, quantise_cache=config.quantise_cache)
    return family.build(name, read, formats, limits(config))


def limits(config: CompileConfig) -> Limits:
    """Return the bounds of a step that a compile configuration asks for."""
    return Limits(
        max_tokens=config.max_tokens_per_step,
        max_requests=config.max_requests,
        max_logit_rows=config.max_tokens_per_step,
        max_context=config.max_context,
        block_size=config.block_size,
    )


def _activation(name: str, config: Mapping[str, Any]) -> str:
    """`auto` is what the checkpoint declares; bfloat16 for float16, and where nothing is said."""
    if name != "auto":
        return name
    text = text_settings(config)
    key = "torch_dtype" if text.get("torch_dtype") is not None else "dtype"
    declared = text.get(key)
    if declared not in _DECLARED:
        raise VerifyError(
            f"config '{key}': got {shown(declared)}, want {', '.join(map(str, _DECLARED[1:]))}; "
            "or choose with --dtype"
        )
    return "float32" if declared == "float32" else "bfloat16"


def _context(wanted: int | None, limit: int) -> int:
    if wanted is None:
        return limit
    if wanted > limit:
        raise VerifyError(
            f"setting 'max_context': longer than the model's own: got {wanted}, "
            f"want at most {limit}"
        )
    return wanted


def _formats(checkpoint: Checkpoint, activation: DType) -> dict[str, ElementType]:
    """Keep quantised tensors as they are; with bf16 activations, matrices are rounded to bf16, but
    for fp32 ones in a checkpoint that has others in bf16: those are meant to be exact."""
    found: dict[str, ElementType] = {}
    matrices = [e for e in checkpoint.tensors.values() if len(e.shape) > 1]
    exact = any(e.dtype == "bf16" for e in matrices)
    for name, entry in checkpoint.tensors.items():
        if entry.dtype == "f8_e8m0":
            raise VerifyError(f"{entry.where}: scales of a weight that is missing or not quantised")
        if entry.dtype not in _STORED and entry.scale is None:
            raise VerifyError(
                f"tensor '{name}': cannot be used as it is stored: got {entry.dtype}, "
                f"want {', '.join(_STORED)}"
            )
        found[name] = _stored_as(entry, activation, exact)
    return found


def _stored_as(entry: TensorEntry, activation: DType, exact: bool) -> ElementType:
    if entry.scale is not None:
        return element_type(entry.dtype)
    if len(entry.shape) == 1 and entry.dtype not in _INTS:
        return F32 if entry.dtype == "f16" else element_type(_STORED[entry.dtype])
    rounded = ("f16",) if exact else ("f32", "f16")
    if activation == BF16 and entry.dtype in rounded:
        return BF16
    return element_type(_STORED[entry.dtype])


def _account(graph: Graph, checkpoint: Checkpoint, unread: Iterable[str]) -> None:
    expected = {
        name: tuple(int(d) for d in w.type.shape[-2:])
        for w in graph.weights
        for name in w.expr.tensors
    }
    ignored = [*_UNREAD, *unread]
    if "lm_head.weight" not in expected:
        ignored.append("lm_head.weight")
    account(expected, checkpoint, ignored=ignored)


def _model_record(
    checkpoint: Checkpoint, family: str, vocab_size: int, config: CompileConfig
) -> ModelRecord:
    generation = checkpoint.generation
    for token in (*generation.eos_ids, generation.bos_id):
        if token is not None and token >= vocab_size:
            raise VerifyError(
                f"checkpoint '{checkpoint.name}': special token outside the vocabulary: "
                f"got {token}, want below {vocab_size} ({checkpoint.source})"
            )
    plain = (str, int, float, bool)
    settings = {k: v for k, v in checkpoint.config.items() if isinstance(v, plain)}
    return ModelRecord(
        name=checkpoint.name,
        family=family,
        vocab_size=vocab_size,
        max_context=config.max_context,
        block_size=config.block_size,
        bos_id=generation.bos_id,
        eos_ids=generation.eos_ids,
        add_bos=generation.add_bos,
        chat_template=checkpoint.chat_template,
        tokenizer=TOKENIZER if checkpoint.tokenizer_json else None,
        config={**settings, **checkpoint.special_tokens},
    )
