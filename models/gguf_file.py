"""GGUF files: a bounded parser of the header, and the tensors as mapped bytes.

Layout: magic, version, counts, metadata, tensor records, then aligned tensor data
(github.com/ggml-org/ggml, docs/gguf.md). Nothing in the file is trusted: every count and offset
is checked against the bytes that are there.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tilewright.graph.errors import VerifyError
from tilewright.models.quants import BLOCK_FORMATS
from tilewright.models.record import Bytes, TensorEntry, map_file, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_COUNT = 1 << 20
MAX_NAME_BYTES = 1 << 16
MAX_RANK = 4
MAX_EXTENT = 1 << 48
MAX_ALIGNMENT = 1 << 20

# ggml's type numbers (ggml.h, enum ggml_type); the gaps are types that ggml withdrew.
GGML_TYPES = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    9: "q8_1",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    15: "q8_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    24: "i8",
    25: "i16",
    26: "i32",
    27: "i64",
    28: "f64",
    29: "iq1_m",
    30: "bf16",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
}

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

_BOOL, _STRING, _ARRAY = 7, 8, 9
# Value type -> struct code, which is also numpy's.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass
class _Cursor:
    """A place in the header; every step forward is checked against the end of the file."""

    view: memoryview
    path: Path
    at: int = 0

    def step(self, size: int, what: str) -> int:
        """Move over `size` bytes and return where they begin."""
        begin = self.at
        if size > len(self.view) - begin:
            raise VerifyError(
                f"file '{self.path}': truncated in {what}: got {len(self.view) - begin} bytes "
                f"at {begin}, want {size}"
            )
        self.at = begin + size
        return begin

    def number(self, code: str, what: str) -> int | float:
        """Read one little-endian number."""
        form = f"<{code}"
        begin = self.step(struct.calcsize(form), what)
        value: int | float = struct.unpack_from(form, self.view, begin)[0]
        return value

    def count(self, what: str, limit: int, *, code: str = "Q") -> int:
        """Read a count that the rest of the file must be able to hold."""
        value = int(self.number(code, what))
        if value > limit:
            raise VerifyError(
                f"file '{self.path}': {what} is too large: got {value}, want at most {limit}"
            )
        return value

    def text(self, what: str, limit: int) -> str:
        """Read a string."""
        size = self.count(f"length of {what}", limit)
        begin = self.step(size, what)
        try:
            return str(self.view[begin : begin + size], "utf-8")
        except UnicodeDecodeError as error:
            raise VerifyError(
                f"file '{self.path}': {what} is not UTF-8 at byte {begin + error.start}"
            ) from error

    def texts(self, what: str, count: int) -> tuple[str, ...]:
        """Read consecutive strings; a vocabulary has 10^5, so the loop is spelled out."""
        view, at, end = self.view, self.at, len(self.view)
        unpack = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            begin = at + 8
            size = unpack(view, at)[0] if begin <= end else end
            if size > end - begin:
                raise VerifyError(
                    f"file '{self.path}': truncated in {what}: got a string of {size} bytes "
                    f"at {at}, want at most {max(end - begin, 0)}"
                )
            at = begin + size
            found.append(bytes(view[begin:at]))
        self.at = at
        try:
            return tuple([each.decode("utf-8") for each in found])
        except UnicodeDecodeError as error:
            raise VerifyError(
                f"file '{self.path}': {what} holds text that is not UTF-8: "
                f"got {shown(error.object)}"
            ) from error


@dataclass(frozen=True, eq=False)
class GgufFile:
    """The metadata and tensors of one file, under the names that the file uses."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry] = field(repr=False)


def _read_scalar(cursor: _Cursor, kind: int, what: str) -> Scalar:
    """Read one value of a scalar type."""
    if kind == _STRING:
        return cursor.text(what, len(cursor.view))
    if kind == _BOOL:
        return cursor.count(what, 1, code="B") == 1
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind], what)
    raise VerifyError(
        f"file '{cursor.path}': {what} has an unknown type: got {kind}, want 0 to 12"
    )


def _read_array(cursor: _Cursor, what: str) -> tuple[Scalar, ...]:
    """Read a one-dimensional array; numbers are taken at once."""
    kind = int(cursor.number("I", f"type of {what}"))
    room = len(cursor.view) - cursor.at
    count = cursor.count(f"length of {what}", room)
    if kind in _NUMBERS:
        dtype = np.dtype(f"<{_NUMBERS[kind]}" if kind not in (10, 11) else f"<{'ui'[kind - 10]}8")
        begin = cursor.step(count * dtype.itemsize, what)
        return tuple(np.frombuffer(cursor.view, dtype, count, begin).tolist())
    if kind == _STRING:
        return cursor.texts(what, count)
    if kind == _BOOL:
        return tuple(cursor.count(what, 1, code="B") == 1 for _ in range(count))
    raise VerifyError(
        f"file '{cursor.path}': {what} is an array of an unsupported type: got {kind}, "
        "want numbers, booleans or strings"
    )


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    """Read the key-value pairs."""
    found: dict[str, Value] = {}
    for i in range(count):
        key = cursor.text(f"metadata key {i}", MAX_NAME_BYTES)
        what = f"metadata {shown(key)}"
        if key in found:
            raise VerifyError(f"file '{cursor.path}': {what} appears more than once")
        kind = int(cursor.number("I", f"type of {what}"))
        if kind == _ARRAY:
            found[key] = _read_array(cursor, what)
        else:
            found[key] = _read_scalar(cursor, kind, what)
    return found


@dataclass(frozen=True)
class _Record:
    """One tensor record: where its data begins, relative to the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def _read_record(cursor: _Cursor, i: int) -> _Record:
    """Read one tensor record and check its format and shape."""
    name = cursor.text(f"name of tensor {i}", MAX_NAME_BYTES)
    where = f"tensor {shown(name)} ({cursor.path})"
    rank = int(cursor.number("I", f"rank of tensor {shown(name)}"))
    if not 1 <= rank <= MAX_RANK:
        raise VerifyError(f"{where}: bad number of dims: got {rank}, want 1 to {MAX_RANK}")
    extents = [int(cursor.number("Q", f"shape of tensor {shown(name)}")) for _ in range(rank)]
    shape = tuple(reversed(extents))
    if not all(1 <= extent <= MAX_EXTENT for extent in shape):
        raise VerifyError(
            f"{where}: bad shape: got {list(shape)}, want extents from 1 to {MAX_EXTENT}"
        )
    number = int(cursor.number("I", f"type of tensor {shown(name)}"))
    dtype = GGML_TYPES.get(number, f"type {number}")
    if dtype not in BLOCK_FORMATS:
        raise VerifyError(
            f"{where}: unsupported quantisation: got {dtype}, "
            f"want one of {', '.join(BLOCK_FORMATS)}"
        )
    if shape[-1] % BLOCK_FORMATS[dtype].block:
        raise VerifyError(
            f"{where}: rows do not divide into blocks of {dtype}: got {shape[-1]} columns, "
            f"want a multiple of {BLOCK_FORMATS[dtype].block}"
        )
    return _Record(name, dtype, shape, int(cursor.number("Q", f"offset of tensor {shown(name)}")))


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _alignment(metadata: Mapping[str, Value], path: Path) -> int:
    """The alignment of tensor data, 32 bytes unless the file says otherwise."""
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise VerifyError(
            f"file '{path}': bad metadata 'general.alignment': got {shown(value)}, "
            f"want a power of two up to {MAX_ALIGNMENT}"
        )
    return value


def _place(
    records: list[_Record], mapped: Bytes, start: int, alignment: int, path: Path
) -> dict[str, TensorEntry]:
    """Check that the tensors fill the data section in aligned steps, and map each."""
    found: dict[str, TensorEntry] = {}
    at, end, before = start, start, "the header"
    for record in sorted(records, key=lambda each: each.offset):
        where = f"tensor {shown(record.name)} ({path})"
        form = BLOCK_FORMATS[record.dtype]
        num_bytes = math.prod(record.shape) // form.block * form.block_bytes
        offset = start + record.offset
        if offset != at:
            problem = (
                "is not aligned after"
                if record.offset % alignment
                else "overlaps" if offset < at else "leaves a hole after"
            )
            raise VerifyError(
                f"{where}: {problem} {before}: got offset {record.offset}, want {at - start}"
            )
        end = offset + num_bytes
        if end > mapped.size:
            raise VerifyError(
                f"{where}: ends beyond the file: got a file of {mapped.size} bytes, "
                f"want at least {end}; the file is truncated"
            )
        at, before = _aligned(end, alignment), f"tensor {shown(record.name)}"
        found[record.name] = TensorEntry(
            record.name, record.dtype, record.shape, path, offset, num_bytes, mapped
        )
    if mapped.size > at:
        raise VerifyError(
            f"file '{path}': trailing bytes after {before}: got {mapped.size} bytes, "
            f"want at most {at}"
        )
    return found


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata pairs."""
    path = cursor.path
    begin = cursor.step(4, "the magic")
    magic = bytes(cursor.view[begin : begin + 4])
    if magic != MAGIC:
        raise VerifyError(f"file '{path}': not a GGUF file: got magic {magic!r}, want {MAGIC!r}")
    version = int(cursor.number("I", "the version"))
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise VerifyError(f"file '{path}': is big-endian, want a little-endian GGUF file")
        raise VerifyError(
            f"file '{path}': unknown GGUF version: got {version}, want "
            f"{' or '.join(map(str, VERSIONS))}"
        )
    num_tensors = cursor.count("number of tensors", MAX_COUNT)
    return num_tensors, cursor.count("number of metadata pairs", MAX_COUNT)


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensors of one file; no tensor byte is read.

    Shapes are row-major, so the file's order of extents is reversed. Raises VerifyError, naming
    file and tensor, for anything that breaks the format and for unsupported quantisations.
    """
    mapped = map_file(path)
    cursor = _Cursor(mapped.data, path)
    num_tensors, num_pairs = _read_preamble(cursor)
    metadata = _read_metadata(cursor, num_pairs)
    alignment = _alignment(metadata, path)
    records: dict[str, _Record] = {}
    for i in range(num_tensors):
        record = _read_record(cursor, i)
        if record.name in records:
            raise VerifyError(f"tensor {shown(record.name)} ({path}): appears more than once")
        records[record.name] = record
    start = _aligned(cursor.at, alignment)
    tensors = _place(list(records.values()), mapped, start, alignment, path)
    return GgufFile(path, metadata, tensors)
