"""What a checkpoint is, whatever file it came from: settings, tensors and tokenizer.

Tensor bytes stay in the memory-mapped file until someone asks for them.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilewright.graph.errors import VerifyError
from tilewright.models.quants import dequantise
from tilewright.models.scales import dequantise_scaled

Bytes = NDArray[np.uint8]

# Names and values come from files: an error must stay one readable line whatever they hold.
MAX_SHOWN = 120
MAX_TEXT_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """One stored tensor: its place in a mapped file and how to read its bytes.

    `shape` is row-major [rows, cols]; `dtype` names the storage format ("f32", "q4_1", ...). Where
    scales lie in a tensor of their own, `scale` is that and `dtype` the text of the element type.
    `below`: its whole numbers are places among so many, counted from 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int
    mapped: Bytes = field(repr=False)
    scale: TensorEntry | None = None
    below: int | None = None

    @property
    def where(self) -> str:
        """The tensor and its file, for the start of an error."""
        return f"tensor {shown(self.name)} ({self.path})"

    def raw(self) -> Bytes:
        """The stored bytes, [num_bytes], as a read-only view of the mapped file."""
        return self.mapped[self.offset : self.offset + self.num_bytes]

    def dequantise(self) -> NDArray[np.float32]:
        """The values in float32, of `shape`. Raises VerifyError for a dtype without a formula."""
        if self.scale is not None:
            return dequantise_scaled(self)
        return dequantise(self.dtype, self.raw(), self.shape, where=self.where)


@dataclass(frozen=True)
class Generation:
    """Which tokens end a text, and which one starts it.

    Text is encoded without special tokens; `bos_id` is put in front where `add_bos` says so.
    """

    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's settings under Hugging Face keys, its tensors under Hugging Face names.

    `special_tokens`: what a chat template finds under names such as `eos_token`, where the files
    say it. That need not be a token which ends or starts a text.
    """

    name: str
    source: Path
    config: Mapping[str, object]
    tensors: Mapping[str, TensorEntry]
    tokenizer_json: str | None
    chat_template: str | None
    generation: Generation
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def shown(value: object) -> str:
    """A value from a file as one bounded piece of an error message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def map_file(path: Path) -> Bytes:
    """Map a file read-only as bytes. Raises VerifyError if it cannot be opened or is empty."""
    if not path.is_file():
        raise VerifyError(f"file '{path}': does not exist or is not a regular file")
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise VerifyError(f"file '{path}': is empty: got 0 bytes, want a header")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise VerifyError(f"file '{path}': cannot be read: {error.strerror}") from error
    return np.frombuffer(mapped, dtype=np.uint8)


def read_text(path: Path) -> str:
    """The text of a small file. Raises VerifyError if it is missing, huge or not UTF-8."""
    mapped = map_file(path)
    if mapped.size > MAX_TEXT_BYTES:
        raise VerifyError(
            f"file '{path}': too long for a text file: got {mapped.size} bytes, "
            f"want at most {MAX_TEXT_BYTES}"
        )
    try:
        return mapped.tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise VerifyError(f"file '{path}': not UTF-8 at byte {error.start}") from error


def parse_object(text: str, where: str) -> dict[str, object]:
    """Parse a JSON object. Raises VerifyError for bad JSON, a repeated key or another value."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise VerifyError(f"{where}: key {shown(key)} appears more than once")
            found[key] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise VerifyError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise VerifyError(f"{where}: not valid JSON: {shown(str(error))}") from error
    if not isinstance(value, dict):
        raise VerifyError(f"{where}: got JSON of type {type(value).__name__}, want an object")
    return value


def read_object(path: Path) -> dict[str, object]:
    """Read a JSON object from a file; raises VerifyError as `read_text` and `parse_object` do."""
    return parse_object(read_text(path), f"file '{path}'")
