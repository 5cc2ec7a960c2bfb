"""The artifact format: all that compile time and run time share.

A directory with `manifest.json`, `kernels/`, `sources/`, `weights.bin` and the tokenizer. Records here are plain
and JSON-able; an extent is an int, a dim name, or a tree such as ["ceildiv", "tokens", 128].
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tilewright.runtime.errors import ArtifactError

FORMAT = 1
ABI = "tvm-ffi/1"

ROW_MAJOR = "row_major"  # the layout of a weight stored as its type and shape say
ALIGNMENT = 64  # of every tensor's data, in bytes
ITEM_BYTES: Mapping[str, int] = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "ue8m0": 1,
    "i64": 8, "i32": 4, "i8": 1, "u8": 1,
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
class WeightRecord:
    """A packed weight: `num_bytes` at `offset` of the weights file. `format` is its logical type."""

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
    """One loadable kernel. `numerics` decides bits, `schedule` only speed."""

    symbol: str
    template: str
    source: str
    nodes: tuple[str, ...]
    numerics: Mapping[str, Any]
    schedule: Mapping[str, Any]
    flops: Extent
    num_bytes: Extent


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a launch. `kind`: input, output, state, weight, buffer or scratch."""

    kind: str
    name: str


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel call: tensors in the order outputs, states, inputs, weights, workspace; then ints."""

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
    states: tuple[TensorRecord, ...]
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
    return _read(cls, tree, where)


def _read(want: Any, tree: Any, where: str) -> Any:
    """Check `tree` against a type annotation and convert lists to tuples and dicts to records."""
    if dataclasses.is_dataclass(want) and isinstance(want, type):
        return _read_record(want, tree, where)
    origin, args = typing.get_origin(want), typing.get_args(want)
    if origin is tuple:
        _expect(isinstance(tree, list), where, tree, "a list")
        return tuple(_read(args[0], item, f"{where}[{i}]") for i, item in enumerate(tree))
    if origin is types.UnionType or origin is typing.Union:
        return _read_union(args, tree, where)
    if want is Any:
        return tree
    if origin is list:
        _expect(isinstance(tree, list), where, tree, "a list")
        return tree
    if origin is not None:  # Mapping[str, X]
        _expect(isinstance(tree, dict), where, tree, "an object")
        return {key: _read(args[1], value, f"{where}.{key}") for key, value in tree.items()}
    ok = isinstance(tree, want) and not (want is not bool and isinstance(tree, bool))
    _expect(ok, where, tree, want.__name__)
    return tree


def _read_union(args: tuple[Any, ...], tree: Any, where: str) -> Any:
    if tree is None and type(None) in args:
        return None
    for choice in args:
        base = typing.get_origin(choice) or choice
        if isinstance(tree, base) and not isinstance(tree, bool):
            return _read(choice, tree, where)
    names = " or ".join(getattr(a, "__name__", str(a)) for a in args)
    raise ArtifactError(f"manifest '{where}': got {_short(tree)}, want {names}")


def _read_record(cls: type[Any], tree: Any, where: str) -> Any:
    _expect(isinstance(tree, dict), where, tree, "an object")
    hints = typing.get_type_hints(cls)
    for name in tree:
        if name not in hints:
            raise ArtifactError(f"manifest '{where}': unknown field '{name}': have {', '.join(hints)}")
    for name in hints:
        if name not in tree:
            raise ArtifactError(f"manifest '{where}': field '{name}' is missing")
    return cls(**{name: _read(hints[name], tree[name], f"{where}.{name}") for name in hints})


def _expect(condition: bool, where: str, tree: Any, want: str) -> None:
    if not condition:
        raise ArtifactError(f"manifest '{where}': got {_short(tree)}, want {want}")


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
            raise ArtifactError(f"extent '{extent}': unknown form: want ceildiv, add, mul, max, min")
