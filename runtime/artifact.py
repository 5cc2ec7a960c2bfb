"""The artifact format: all that compile time and run time share.

A directory with `manifest.json`, `kernels/`, `sources/`, `weights.bin` and the tokenizer. Records
here are plain and JSON-able; an extent is an int, a dim name, or a tree such as
["ceildiv", "tokens", 128].
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tilewright.runtime.errors import ArtifactError

FORMAT = 3
ABI = "tvm-ffi/1"

ROW_MAJOR = "row_major"  # the layout of a weight stored as its type and shape say
ALIGNMENT = 64  # of every tensor's data, in bytes
MAX_SCRATCH = 1 << 30  # bytes that a launch may want, or each of its threads
ITEM_BYTES: Mapping[str, int] = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "ue8m0": 1,
    "i64": 8,
    "i32": 4,
    "i8": 1,
    "u8": 1,
}

Extent: TypeAlias = "int | str | list[Any]"


@dataclass(frozen=True)
class DimRecord:
    """A named extent with its role (batch or context) and inclusive bounds."""

    name: str
    role: str
    lower: int
    upper: int


@dataclass(frozen=True)
class TensorRecord:
    """Dtype name and shape of an input, output, state or buffer."""

    name: str
    dtype: str
    shape: tuple[Extent, ...]


@dataclass(frozen=True)
class StateRecord(TensorRecord):
    """What outlives a step: paged rows or blocks, and how long an entry of them lives.

    `dtype` and `shape` say how it lies in memory, `format` what an entry means: packed rows are u8.
    `scope`: `block` entries live as long as their request, `window` entries until `window` newer
    positions exist. An entry stands for `positions_per_entry` positions. Rows of a window state are
    read in whole groups of `group` positions, counted from position 0: once a group is complete,
    only the `window - group` positions before the next one are read again. `tables`: the input that
    says where the pages of a request are.
    """

    format: str
    scope: str
    positions_per_entry: int
    window: int
    group: int
    tables: str


@dataclass(frozen=True)
class WeightRecord:
    """A packed weight: `num_bytes` at `offset` of the weights file. `format`: its logical type."""

    name: str
    format: str
    shape: tuple[int, ...]
    layout: str
    offset: int
    num_bytes: int


def weight_tensor(weight: WeightRecord) -> TensorRecord:
    """Return what a kernel receives for a weight: itself if row-major, else its bytes as u8[n]."""
    if weight.layout == ROW_MAJOR:
        return TensorRecord(weight.name, weight.format, weight.shape)
    return TensorRecord(weight.name, "u8", (weight.num_bytes,))


@dataclass(frozen=True)
class KernelRecord:
    """One loadable kernel. `numerics` decides bits, `schedule` only speed. `num_bytes` are those a
    launch moves, `weight_bytes` the weights among them."""

    symbol: str
    template: str
    source: str
    nodes: tuple[str, ...]
    numerics: Mapping[str, Any]
    schedule: Mapping[str, Any]
    flops: Extent
    num_bytes: Extent
    weight_bytes: Extent


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a launch. `kind`: input, output, state, weight, buffer or scratch."""

    kind: str
    name: str


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel call: tensors in order outputs, states, inputs, weights, workspace; then ints."""

    kernel: str
    group: str
    arguments: tuple[Argument, ...]
    ints: tuple[Extent, ...]


@dataclass(frozen=True)
class Placement:
    """A buffer's place in the arena of one bucket, in bytes."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class BucketRecord:
    """The plan for steps whose dims are at most `bounds`: launches in order, buffers placed."""

    name: str
    bounds: Mapping[str, int]
    launches: tuple[LaunchRecord, ...]
    placements: tuple[Placement, ...]
    arena_bytes: int
    scratch_bytes_per_thread: int


@dataclass(frozen=True)
class TargetRecord:
    """What the kernels were built for. `features` are CPU flags or a GPU architecture."""

    name: str
    variant: str
    features: tuple[str, ...]
    compiler: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class ModelRecord:
    """What the runtime must know of the model to serve requests."""

    name: str
    family: str
    vocab_size: int
    max_context: int
    block_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
    tokenizer: str | None  # file name, or None: token ids only
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """Everything about an artifact. `digests` maps each file but the weights to its SHA-256."""

    format: int
    abi: str
    version: str
    target: TargetRecord
    mode: str
    dtype: str
    model: ModelRecord
    dims: tuple[DimRecord, ...]
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    states: tuple[StateRecord, ...]
    buffers: tuple[TensorRecord, ...]
    weights: tuple[WeightRecord, ...]
    weights_file: str
    weights_bytes: int
    weights_digest: str
    kernels: tuple[KernelRecord, ...]
    library: str
    buckets: tuple[BucketRecord, ...]
    compile_config: Mapping[str, Any]
    numerics_digest: str
    invariance: str  # proven | unproven
    digests: Mapping[str, str]


def to_json(record: Any) -> Any:
    """Return plain JSON data of a record."""
    return dataclasses.asdict(record)


def from_json(cls: type[Any], tree: Any, where: str) -> Any:
    """Build a record from JSON data; raise ArtifactError naming the field that does not fit."""
    want: Any = cls
    return _reader(want)(tree, where)


_Reader: TypeAlias = Callable[[Any, str], Any]


@functools.cache  # a manifest holds thousands of records of a few types
def _reader(want: Any) -> _Reader:
    """Return a function that checks JSON data against a type and makes tuples and records of it."""
    if dataclasses.is_dataclass(want) and isinstance(want, type):
        return _record_reader(want)
    origin, args = typing.get_origin(want), typing.get_args(want)
    if origin is tuple:
        return _tuple_reader(_reader(args[0]))
    if origin is types.UnionType or origin is typing.Union:
        return _union_reader(args)
    if want is Any:
        return lambda tree, where: tree
    if origin is list:
        return _plain_reader(list, "a list")
    if origin is not None:  # Mapping[str, X]
        return _mapping_reader(_reader(args[1]))
    return _plain_reader(want, want.__name__)


def _plain_reader(want: type[Any], name: str) -> _Reader:
    def read(tree: Any, where: str) -> Any:
        if not isinstance(tree, want) or (want is not bool and isinstance(tree, bool)):
            raise _misfit(where, tree, name)
        return sys.intern(tree) if want is str else tree  # names recur in every bucket

    return read


def _tuple_reader(item: _Reader) -> _Reader:
    def read(tree: Any, where: str) -> Any:
        if not isinstance(tree, list):
            raise _misfit(where, tree, "a list")
        return tuple([item(part, f"{where}[{i}]") for i, part in enumerate(tree)])

    return read


def _mapping_reader(value: _Reader) -> _Reader:
    def read(tree: Any, where: str) -> Any:
        if not isinstance(tree, dict):
            raise _misfit(where, tree, "an object")
        return {key: value(part, f"{where}.{key}") for key, part in tree.items()}

    return read


def _union_reader(args: tuple[Any, ...]) -> _Reader:
    choices = [(typing.get_origin(a) or a, _reader(a)) for a in args if a is not type(None)]
    names = " or ".join(getattr(a, "__name__", str(a)) for a in args)

    def read(tree: Any, where: str) -> Any:
        if tree is None and type(None) in args:
            return None
        for base, reader in choices:
            if isinstance(tree, base) and not isinstance(tree, bool):
                return reader(tree, where)
        raise _misfit(where, tree, names)

    return read


def _record_reader(cls: type[Any]) -> _Reader:
    hints = typing.get_type_hints(cls)
    fields = {name: _reader(want) for name, want in hints.items()}
    names_only = all(want is str for want in hints.values())
    make = functools.cache(cls) if names_only else cls  # equal arguments of launches are one object

    def read(tree: Any, where: str) -> Any:
        if not isinstance(tree, dict):
            raise _misfit(where, tree, "an object")
        if tree.keys() != fields.keys():
            raise _wrong_fields(where, tree, fields)
        return make(**{name: fields[name](tree[name], f"{where}.{name}") for name in fields})

    return read


def _wrong_fields(where: str, tree: Mapping[str, Any], fields: Mapping[str, Any]) -> ArtifactError:
    for name in tree:
        if name not in fields:
            known = ", ".join(fields)
            return ArtifactError(f"manifest '{where}': unknown field '{name}': have {known}")
    name = next(name for name in fields if name not in tree)
    return ArtifactError(f"manifest '{where}': field '{name}' is missing")


def _misfit(where: str, tree: Any, want: str) -> ArtifactError:
    return ArtifactError(f"manifest '{where}': got {_short(tree)}, want {want}")


def _short(tree: Any) -> str:
    text = repr(tree)
    return text if len(text) <= 40 else text[:37] + "..."


def evaluate(extent: Extent, dims: Mapping[str, int]) -> int:
    """Return an extent with every dim bound; raise ArtifactError for an unknown name or form."""
    if isinstance(extent, int):
        return extent
    if isinstance(extent, str):
        if extent not in dims:
            raise ArtifactError(f"dim '{extent}': not bound: have {', '.join(dims)}")
        return dims[extent]
    head, *rest = extent
    args = [evaluate(a, dims) for a in rest]
    match head:
        case "ceildiv" if len(args) == 2 and args[1] > 0:
            return -(-args[0] // args[1])
        case "add":
            return sum(args)
        case "mul":
            product = 1
            for value in args:
                product *= value
            return product
        case "max" if args:
            return max(args)
        case "min" if args:
            return min(args)
        case _:
            raise ArtifactError(f"extent '{extent}': unknown: want ceildiv, add, mul, max, min")
