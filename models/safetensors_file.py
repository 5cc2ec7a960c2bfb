"""Safetensors files and sharded sets of them, checked down to the byte before any tensor is read.

Layout: 8 bytes of header length, a JSON header, then the tensors without gaps
(github.com/huggingface/safetensors, section Format).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright.graph.errors import VerifyError
from tilewright.models.record import (
    Bytes,
    TensorEntry,
    map_file,
    parse_object,
    read_object,
    shown,
)

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 8
MAX_EXTENT = 1 << 48
INDEX_NAME = "model.safetensors.index.json"

# Name in the file -> our name and bits of one element. Naming more formats than can be computed
# with lets a later error say which format it met.
DTYPES = {
    "BOOL": ("bool", 8),
    "U8": ("u8", 8),
    "I8": ("i8", 8),
    "U16": ("u16", 16),
    "I16": ("i16", 16),
    "U32": ("u32", 32),
    "I32": ("i32", 32),
    "U64": ("u64", 64),
    "I64": ("i64", 64),
    "F64": ("f64", 64),
    "F32": ("f32", 32),
    "F16": ("f16", 16),
    "BF16": ("bf16", 16),
    "C64": ("c64", 64),
    "F8_E4M3": ("f8_e4m3", 8),
    "F8_E4M3FNUZ": ("f8_e4m3fnuz", 8),
    "F8_E5M2": ("f8_e5m2", 8),
    "F8_E5M2FNUZ": ("f8_e5m2fnuz", 8),
    "F8_E8M0": ("f8_e8m0", 8),
    "F6_E2M3": ("f6_e2m3", 6),
    "F6_E3M2": ("f6_e3m2", 6),
    "F4": ("f4", 4),
}


@dataclass(frozen=True)
class _Header:
    """A parsed header and the place of the first tensor byte."""

    entries: Mapping[str, object]
    start: int


def _read_header(mapped: Bytes, path: Path) -> _Header:
    """Parse the header after checking its length against the file."""
    if mapped.size < 8:
        raise VerifyError(
            f"file '{path}': too short for a safetensors header: got {mapped.size} bytes, "
            "want at least 8"
        )
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if length > mapped.size - 8:
        raise VerifyError(
            f"file '{path}': header is longer than the file: got a header of {length} bytes, "
            f"want at most {mapped.size - 8}"
        )
    if length > MAX_HEADER_BYTES:
        raise VerifyError(
            f"file '{path}': header is too long: got {length} bytes, "
            f"want at most {MAX_HEADER_BYTES}"
        )
    try:
        text = mapped[8 : 8 + length].tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise VerifyError(
            f"file '{path}': header is not UTF-8 at byte {error.start}"
        ) from error
    entries = parse_object(text, f"header of '{path}'")
    entries.pop("__metadata__", None)
    return _Header(entries, 8 + length)


def _integers(value: object, limit: int) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 up to a limit, or None for anything else."""
    if not isinstance(value, list):
        return None
    for item in value:
        if type(item) is not int or not 0 <= item <= limit:
            return None
    return tuple(value)


def _read_shape(value: object, where: str) -> tuple[int, ...]:
    """Check one shape."""
    shape = _integers(value, MAX_EXTENT)
    if shape is None or len(shape) > MAX_RANK:
        raise VerifyError(
            f"{where}: bad shape: got {shown(value)}, "
            f"want a list of at most {MAX_RANK} whole numbers"
        )
    return shape


def _read_entry(name: str, value: object, mapped: Bytes, start: int, path: Path) -> TensorEntry:
    """Check one header entry: dtype, shape, and offsets that fit both the file and the shape."""
    where = f"tensor {shown(name)} ({path})"
    keys = sorted(value) if isinstance(value, dict) else []
    if not isinstance(value, dict) or keys != ["data_offsets", "dtype", "shape"]:
        raise VerifyError(
            f"{where}: bad header entry: got {shown(value)}, "
            "want the keys dtype, shape, data_offsets"
        )
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise VerifyError(
            f"{where}: unknown dtype: got {shown(dtype)}, want one of {', '.join(DTYPES)}"
        )
    ours, bits = DTYPES[dtype]
    shape = _read_shape(value["shape"], where)
    offsets = _integers(value["data_offsets"], MAX_EXTENT)
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise VerifyError(
            f"{where}: bad offsets: got {shown(value['data_offsets'])}, want [begin, end]"
        )
    begin, end = offsets
    room = mapped.size - start
    if end > room:
        raise VerifyError(
            f"{where}: ends beyond the file: got an end at {end}, "
            f"want at most {room}; the file is truncated or its header is wrong"
        )
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise VerifyError(
            f"{where}: offsets do not match the shape: got {end - begin} bytes, "
            f"want {math.prod(shape) * bits / 8:g} for {ours} {list(shape)}"
        )
    return TensorEntry(name, ours, shape, path, start + begin, end - begin, mapped)


def _check_cover(entries: list[TensorEntry], start: int, size: int, path: Path) -> None:
    """Check that the tensors fill the file: no overlap, no hole, nothing after the last."""
    at, before = start, "the header"
    for entry in sorted(entries, key=lambda each: (each.offset, each.num_bytes)):
        if entry.offset != at:
            problem = "overlaps" if entry.offset < at else "leaves a hole after"
            raise VerifyError(
                f"tensor {shown(entry.name)} ({path}): {problem} {before}: "
                f"got a begin at {entry.offset - start}, want {at - start}"
            )
        at, before = entry.offset + entry.num_bytes, f"tensor {shown(entry.name)}"
    if at != size:
        raise VerifyError(
            f"file '{path}': trailing bytes after {before}: got {size} bytes, want {at}"
        )


def read_safetensors(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, in the order of its header; no tensor byte is read.

    Raises VerifyError, naming file and tensor, for anything that breaks the format.
    """
    mapped = map_file(path)
    header = _read_header(mapped, path)
    found = {
        name: _read_entry(name, value, mapped, header.start, path)
        for name, value in header.entries.items()
    }
    _check_cover(list(found.values()), header.start, mapped.size, path)
    return found


def _read_weight_map(path: Path) -> dict[str, str]:
    """The index of a sharded set: tensor name -> file name."""
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise VerifyError(
            f"file '{path}': bad index: got weight_map {shown(weight_map)}, "
            "want an object of tensor and file names"
        )
    for name, shard in weight_map.items():
        # A shard lies beside its index; a path could lead anywhere.
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard:
            raise VerifyError(
                f"tensor {shown(name)} ({path}): bad shard: got {shown(shard)}, "
                "want the name of a file beside the index"
            )
    return weight_map


def read_sharded(index: Path) -> dict[str, TensorEntry]:
    """The tensors of a sharded set, given its index file.

    Raises VerifyError for a missing shard, a tensor that the index and its shard disagree on, a
    tensor in two shards, and as `read_safetensors` does.
    """
    weight_map = _read_weight_map(index)
    found: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            count = sum(each == shard for each in weight_map.values())
            raise VerifyError(
                f"file '{path}': shard is missing: {index.name} places {count} tensors in it"
            )
        for name, entry in read_safetensors(path).items():
            if name in found:
                raise VerifyError(
                    f"tensor {shown(name)} ({path}): also in shard '{found[name].path.name}'"
                )
            found[name] = entry
    _check_index(weight_map, found, index)
    return found


def _check_index(
    weight_map: Mapping[str, str], found: Mapping[str, TensorEntry], index: Path
) -> None:
    """Check that index and shards name the same tensors in the same places."""
    for name, shard in weight_map.items():
        if name not in found:
            raise VerifyError(
                f"tensor {shown(name)} ({index}): not in its shard '{shard}'"
            )
        if found[name].path.name != shard:
            raise VerifyError(
                f"tensor {shown(name)} ({index}): in another shard than the index says: "
                f"got '{found[name].path.name}', want '{shard}'"
            )
    for name, entry in found.items():
        if name not in weight_map:
            raise VerifyError(f"tensor {shown(name)} ({entry.path}): not in the index {index.name}")
