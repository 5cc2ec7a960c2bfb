"""Structural checks of a manifest: every name resolves, every byte range is inside and disjoint.

Nothing here opens a file. An ArtifactError is one sentence about the first thing that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tilewright.runtime.artifact import (
    ALIGNMENT,
    ITEM_BYTES,
    MAX_SCRATCH,
    ROW_MAJOR,
    BucketRecord,
    LaunchRecord,
    Manifest,
    ModelRecord,
    Placement,
    StateRecord,
    TensorRecord,
    WeightRecord,
    evaluate,
)
from tilewright.runtime.errors import ArtifactError

MAX_EXTENT_DEPTH = 8
MAX_VALUE = 1 << 62
_FORMS = ("ceildiv", "add", "mul", "max", "min")


def check_manifest(manifest: Manifest) -> None:
    """Raise ArtifactError unless the manifest is consistent in itself."""
    _check_choices(manifest)
    _check_model(manifest.model, manifest.outputs)
    _check_dims(manifest)
    for kind, names in _names(manifest).items():
        _check_unique(kind, names)
    uppers = {d.name: d.upper for d in manifest.dims}
    for kind in ("input", "output", "state", "buffer"):
        for tensor in _tensors(manifest, kind):
            _check_tensor(kind, tensor, uppers)
    for state in manifest.states:
        _check_state(state)
    _check_weights(manifest)
    for kernel in manifest.kernels:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", kernel.symbol):
            raise ArtifactError(f"kernel '{kernel.symbol}': the symbol is not a C identifier")
    if not manifest.buckets:
        raise ArtifactError("plan 'buckets': got none, want at least one")
    for bucket in manifest.buckets:
        _check_bucket(manifest, bucket, uppers)


def tensor_bytes(tensor: TensorRecord, dims: Mapping[str, int]) -> int:
    """Bytes of a tensor with its dims bound."""
    total = ITEM_BYTES[tensor.dtype]
    for extent in tensor.shape:
        total *= evaluate(extent, dims)
    return total


def bucket_limits(manifest: Manifest, bucket: BucketRecord) -> dict[str, int]:
    """The largest value of every dim in a bucket."""
    return {d.name: bucket.bounds.get(d.name, d.upper) for d in manifest.dims}


def _tensors(manifest: Manifest, kind: str) -> tuple[TensorRecord, ...]:
    tables = {
        "input": manifest.inputs,
        "output": manifest.outputs,
        "state": manifest.states,
        "buffer": manifest.buffers,
    }
    return tables[kind]


def _names(manifest: Manifest) -> dict[str, list[str]]:
    kinds = ("input", "output", "state", "buffer")
    names = {kind: [t.name for t in _tensors(manifest, kind)] for kind in kinds}
    names["weight"] = [w.name for w in manifest.weights]
    names["kernel"] = [k.symbol for k in manifest.kernels]
    names["bucket"] = [b.name for b in manifest.buckets]
    names["dim"] = [d.name for d in manifest.dims]
    return names


def _check_unique(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ArtifactError(f"{kind} '{name}': declared twice")
        seen.add(name)


def _check_choices(manifest: Manifest) -> None:
    for field, value, choices in (
        ("mode", manifest.mode, ("deterministic", "fast")),
        ("invariance", manifest.invariance, ("proven", "unproven")),
    ):
        if value not in choices:
            raise ArtifactError(f"{field} '{value}': unknown: have {', '.join(choices)}")


def _check_model(model: ModelRecord, outputs: tuple[TensorRecord, ...]) -> None:
    """Check what requests are checked against: it has to be what the kernels compute."""
    for name in ("vocab_size", "max_context", "block_size"):
        if not 1 <= getattr(model, name) <= MAX_VALUE:
            raise ArtifactError(f"model '{name}': got {getattr(model, name)}, want at least 1")
    for tensor in outputs:
        if tensor.name == "logits" and tensor.shape[-1:] != (model.vocab_size,):
            raise ArtifactError(
                f"model 'vocab_size': differs from the output 'logits': got {model.vocab_size}, "
                f"want {list(tensor.shape[-1:])}"
            )
    special = [("eos_ids", token) for token in model.eos_ids]
    special += [("bos_id", model.bos_id)] if model.bos_id is not None else []
    for name, token in special:
        if not 0 <= token < model.vocab_size:
            raise ArtifactError(
                f"model '{name}': outside the vocabulary: got {token}, "
                f"want 0 to {model.vocab_size - 1}"
            )


def _check_dims(manifest: Manifest) -> None:
    for dim in manifest.dims:
        if dim.role not in ("batch", "context"):
            raise ArtifactError(f"dim '{dim.name}': got role '{dim.role}', want batch or context")
        if not 0 <= dim.lower <= dim.upper <= MAX_VALUE:
            raise ArtifactError(
                f"dim '{dim.name}': got bounds {dim.lower} to {dim.upper}, want 0 <= lower <= upper"
            )


def _check_extent(where: str, extent: Any, limits: Mapping[str, int]) -> None:
    """Check form, names and size; all forms grow with their dims, so the limits give the most."""
    _check_form(where, extent, limits, 0)
    if evaluate(extent, limits) > MAX_VALUE:
        raise ArtifactError(f"{where}: extent {extent} exceeds 2^62")


def _check_form(where: str, extent: Any, limits: Mapping[str, int], depth: int) -> None:
    if isinstance(extent, str):
        if extent not in limits:
            raise ArtifactError(f"{where}: dim '{extent}' is unknown: have {', '.join(limits)}")
    elif isinstance(extent, list):
        if depth == MAX_EXTENT_DEPTH:
            raise ArtifactError(f"{where}: an extent is nested deeper than {MAX_EXTENT_DEPTH}")
        if len(extent) < 2 or extent[0] not in _FORMS:
            raise ArtifactError(
                f"{where}: got extent {_short(extent)}, want one of {', '.join(_FORMS)}"
            )
        for part in extent[1:]:
            _check_form(where, part, limits, depth + 1)
        if extent[0] == "ceildiv" and not (
            len(extent) == 3 and isinstance(extent[2], int) and extent[2] > 0
        ):
            raise ArtifactError(f"{where}: got extent {_short(extent)}, want a positive divisor")
    elif not isinstance(extent, int) or isinstance(extent, bool) or not 0 <= extent <= MAX_VALUE:
        raise ArtifactError(f"{where}: got extent {_short(extent)}, want an int from 0 to 2^62")


def _short(tree: Any) -> str:
    text = repr(tree)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_tensor(kind: str, tensor: TensorRecord, uppers: Mapping[str, int]) -> None:
    where = f"{kind} '{tensor.name}'"
    if tensor.dtype not in ITEM_BYTES:
        raise ArtifactError(f"{where}: dtype '{tensor.dtype}' is unknown: have {_item_types()}")
    for extent in tensor.shape:
        _check_extent(where, extent, uppers)
    if tensor_bytes(tensor, uppers) > MAX_VALUE:
        raise ArtifactError(f"{where}: its size exceeds 2^62 bytes")


def _check_state(state: StateRecord) -> None:
    where = f"state '{state.name}'"
    if state.scope not in ("block", "window"):
        raise ArtifactError(f"{where}: scope '{state.scope}' is unknown: have block, window")
    is_window = state.scope == "window"
    known = ("window_tables", "tail_window_tables") if is_window else ("block_tables",)
    if state.tables not in known:
        raise ArtifactError(
            f"{where}: tables '{state.tables}' are not of scope {state.scope}: "
            f"have {', '.join(known)}"
        )
    for field, value, lower in (
        ("positions_per_entry", state.positions_per_entry, 1),
        ("window", state.window, int(is_window)),
        ("group", state.group, 1),
    ):
        if not lower <= value <= MAX_VALUE:
            raise ArtifactError(f"{where}: {field}: got {value}, want at least {lower}")
    if state.window and not is_window:
        raise ArtifactError(
            f"{where}: window of scope {state.scope}: got {state.window} positions, want 0"
        )
    if state.group > max(state.window, 1):
        raise ArtifactError(
            f"{where}: group: got {state.group}, want at most {max(state.window, 1)}"
        )


def _item_types() -> str:
    return ", ".join(ITEM_BYTES)


def _check_weights(manifest: Manifest) -> None:
    end, previous = 0, ""
    for weight in sorted(manifest.weights, key=lambda w: (w.offset, w.num_bytes)):
        _check_weight(weight, manifest.weights_bytes)
        if weight.offset < end:
            raise ArtifactError(
                f"weight '{weight.name}': overlaps '{previous}': got offset {weight.offset}, "
                f"want at least {end}"
            )
        end, previous = weight.offset + weight.num_bytes, weight.name


def _check_weight(weight: WeightRecord, total: int) -> None:
    where = f"weight '{weight.name}'"
    if weight.offset < 0 or weight.offset % ALIGNMENT:
        raise ArtifactError(f"{where}: got offset {weight.offset}, want a multiple of {ALIGNMENT}")
    if weight.num_bytes < 0 or weight.offset + weight.num_bytes > total:
        raise ArtifactError(
            f"{where}: outside the weights file: got bytes {weight.offset} to "
            f"{weight.offset + weight.num_bytes}, want at most {total}"
        )
    if weight.layout != ROW_MAJOR:
        return
    tensor = TensorRecord(weight.name, weight.format, weight.shape)
    _check_tensor("weight", tensor, {})
    if tensor_bytes(tensor, {}) != weight.num_bytes:
        raise ArtifactError(
            f"{where}: size differs from its shape: got {weight.num_bytes} bytes, "
            f"want {tensor_bytes(tensor, {})}"
        )


def _check_bucket(manifest: Manifest, bucket: BucketRecord, uppers: Mapping[str, int]) -> None:
    where = f"bucket '{bucket.name}'"
    lowers = {d.name: d.lower for d in manifest.dims}
    for name, bound in bucket.bounds.items():
        if name not in uppers:
            raise ArtifactError(f"{where}: dim '{name}' is unknown: have {', '.join(uppers)}")
        if not lowers[name] <= bound <= uppers[name]:
            raise ArtifactError(
                f"{where}: bound of '{name}': got {bound}, "
                f"want {lowers[name]} to {uppers[name]}"
            )
    if not 0 <= bucket.arena_bytes <= MAX_VALUE:
        raise ArtifactError(f"{where}: got an arena of {bucket.arena_bytes} bytes, want 0 or more")
    if not 0 <= bucket.scratch_bytes_per_thread <= MAX_SCRATCH:
        raise ArtifactError(
            f"{where}: got {bucket.scratch_bytes_per_thread} bytes of scratch per thread, "
            f"want 0 to {MAX_SCRATCH}"
        )
    limits = bucket_limits(manifest, bucket)
    _check_placements(manifest, bucket, limits, where)
    _check_launches(manifest, bucket, limits, where)
    _check_disjoint(bucket, where)


def _check_placements(
    manifest: Manifest, bucket: BucketRecord, limits: Mapping[str, int], where: str
) -> None:
    _check_unique(f"{where}: placement", (p.name for p in bucket.placements))
    buffers = {b.name: b for b in manifest.buffers}
    for place in bucket.placements:
        if place.name not in buffers:
            raise ArtifactError(f"{where}: placement '{place.name}': there is no such buffer")
        if place.offset < 0 or place.offset % ALIGNMENT:
            raise ArtifactError(
                f"{where}: placement '{place.name}': got offset {place.offset}, "
                f"want a multiple of {ALIGNMENT}"
            )
        if place.offset + place.num_bytes > bucket.arena_bytes:
            raise ArtifactError(
                f"{where}: placement '{place.name}': outside the arena: got bytes {place.offset} "
                f"to {place.offset + place.num_bytes}, want at most {bucket.arena_bytes}"
            )
        need = tensor_bytes(buffers[place.name], limits)
        if place.num_bytes < need:
            raise ArtifactError(
                f"{where}: placement '{place.name}': too small: got {place.num_bytes} bytes, "
                f"want {need}"
            )


def _check_launches(
    manifest: Manifest, bucket: BucketRecord, limits: Mapping[str, int], where: str
) -> None:
    names = {kind: frozenset(values) for kind, values in _names(manifest).items()}
    placed = frozenset(p.name for p in bucket.placements)
    for launch_id, launch in enumerate(bucket.launches):
        at = f"{where}: launch {launch_id} '{launch.group}'"
        if launch.kernel not in names["kernel"]:
            raise ArtifactError(f"{at}: there is no kernel '{launch.kernel}'")
        _check_arguments(launch, names, placed, at)
        for extent in launch.ints:
            _check_extent(at, extent, limits)
        if any(a.kind == "scratch" for a in launch.arguments) and (
            bucket.scratch_bytes_per_thread == 0
        ):
            raise ArtifactError(f"{at}: uses scratch, but the bucket has 0 bytes per thread")


def _check_arguments(
    launch: LaunchRecord, names: Mapping[str, frozenset[str]], placed: frozenset[str], at: str
) -> None:
    for index, argument in enumerate(launch.arguments):
        kind, name = argument.kind, argument.name
        if kind == "scratch":
            if index != len(launch.arguments) - 1:
                raise ArtifactError(f"{at}: scratch is argument {index}, want the last tensor")
        elif kind not in ("input", "output", "state", "weight", "buffer"):
            raise ArtifactError(
                f"{at}: argument kind '{kind}' is unknown: "
                "have input, output, state, weight, buffer, scratch"
            )
        elif name not in names[kind]:
            raise ArtifactError(f"{at}: there is no {kind} '{name}'")
        elif kind == "buffer" and name not in placed:
            raise ArtifactError(f"{at}: buffer '{name}' has no place in the arena")


def _check_disjoint(bucket: BucketRecord, where: str) -> None:
    """Refuse two buffers that share bytes while both are live (first to last launch using them)."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for launch_id, launch in enumerate(bucket.launches):
        for argument in launch.arguments:
            if argument.kind == "buffer":
                first.setdefault(argument.name, launch_id)
                last[argument.name] = launch_id
    live: list[Placement] = []
    used = [p for p in bucket.placements if p.name in first and p.num_bytes > 0]
    for place in sorted(used, key=lambda p: first[p.name]):
        live = [p for p in live if last[p.name] >= first[place.name]]
        for other in live:
            if place.offset < other.offset + other.num_bytes and (
                other.offset < place.offset + place.num_bytes
            ):
                raise ArtifactError(
                    f"{where}: placements '{other.name}' and '{place.name}' share bytes while "
                    f"both are live (launch {first[place.name]})"
                )
        live.append(place)
