"""What an artifact holds, as plain data: plan, kernels, numerics, memory. Needs no compiler.

Equal artifacts give equal data in equal order, so that two printouts can be compared by line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.runtime.artifact import (
    Extent,
    Manifest,
    TensorRecord,
    to_json,
)
from tilewright.runtime.plan_check import bucket_limits, tensor_bytes
from tilewright.tools.cache_facts import cache_facts


def extent_text(extent: Extent) -> str:
    """Print an extent as arithmetic: 576, tokens, or 256 + 516·tokens."""
    if not isinstance(extent, list):
        return str(extent)
    head, *rest = extent
    parts = [extent_text(a) for a in rest]
    match head:
        case "add":
            return " + ".join(parts)
        case "mul":
            return "·".join(map(_factor, rest, parts))
        case "ceildiv":
            return f"ceil({_factor(rest[0], parts[0])} / {parts[1]})"
    return f"{head}({', '.join(parts)})"


def _factor(extent: Extent, text: str) -> str:
    return f"({text})" if isinstance(extent, list) and extent[0] == "add" else text


def tensor_text(tensor: TensorRecord) -> str:
    """Print a type: bf16[tokens, 576]."""
    return f"{tensor.dtype}[{', '.join(extent_text(e) for e in tensor.shape)}]"


def tensor_types(manifest: Manifest) -> dict[tuple[str, str], str]:
    """Types of all that a launch may name, by kind and name; weights as they are packed."""
    types = {
        ("weight", w.name): f"{w.format}[{', '.join(map(str, w.shape))}] {w.layout}"
        for w in manifest.weights
    }
    for kind, table in (
        ("input", manifest.inputs),
        ("output", manifest.outputs),
        ("state", manifest.states),
        ("buffer", manifest.buffers),
    ):
        types.update({(kind, t.name): tensor_text(t) for t in table})
    return types


def plan_facts(manifest: Manifest) -> list[dict[str, Any]]:
    """Every bucket with its launches in order."""
    types = tensor_types(manifest)
    return [
        {
            "bucket": b.name,
            "bounds": dict(b.bounds),
            "arena_bytes": b.arena_bytes,
            "scratch_bytes_per_thread": b.scratch_bytes_per_thread,
            "launches": [
                {
                    "group": launch.group,
                    "kernel": launch.kernel,
                    "arguments": [
                        {"kind": a.kind, "name": a.name, "type": types.get((a.kind, a.name), "u8")}
                        for a in launch.arguments
                    ],
                    "ints": [extent_text(e) for e in launch.ints],
                }
                for launch in b.launches
            ],
        }
        for b in manifest.buckets
    ]


def kernel_facts(manifest: Manifest) -> list[dict[str, Any]]:
    """Every kernel with numerics, schedule, cost, and the buckets and launches that use it."""
    used: dict[str, dict[str, int]] = {k.symbol: {} for k in manifest.kernels}
    for bucket in manifest.buckets:
        for launch in bucket.launches:
            counts = used[launch.kernel]
            counts[bucket.name] = counts.get(bucket.name, 0) + 1
    return [
        {
            "kernel": k.symbol,
            "template": k.template,
            "nodes": list(k.nodes),
            "numerics": dict(k.numerics),
            "schedule": dict(k.schedule),
            "flops": extent_text(k.flops),
            "bytes": extent_text(k.num_bytes),
            "launches": used[k.symbol],
            "source": k.source,
        }
        for k in manifest.kernels
    ]


def numerics_facts(manifest: Manifest, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numerics of each distinct group, its schedule in every bucket, and the digest of it all."""
    kernels = {k.symbol: k for k in manifest.kernels}
    shapes: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for group in groups:
        shapes.setdefault(tuple(group["kernels"].items()), []).append(group["group"])
    rows = []
    for key, names in shapes.items():
        found = [dict(kernels[symbol].numerics) for _, symbol in key]
        same = all(f == found[0] for f in found)
        rows.append(
            {
                "group": names[0],
                "groups": len(names),
                "template": kernels[key[0][1]].template,
                "numerics": found[0] if same else {b: dict(kernels[s].numerics) for b, s in key},
                "one_for_all_buckets": same,
                "schedules": {b: dict(kernels[s].schedule) for b, s in key},
                "kernels": dict(key),
            }
        )
    return {
        "numerics_digest": manifest.numerics_digest,
        "mode": manifest.mode,
        "invariance": manifest.invariance,
        "groups": rows,
    }


def memory_facts(manifest: Manifest) -> dict[str, Any]:
    """Bytes of weights by format, of the cache, and of each bucket's arena and scratch."""
    formats: dict[str, dict[str, int]] = {}
    for weight in manifest.weights:
        row = formats.setdefault(weight.format, {"tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += weight.num_bytes
    largest: dict[str, int] = {}
    for bucket in manifest.buckets:
        for t in (*manifest.inputs, *manifest.outputs):
            size = tensor_bytes(t, bucket_limits(manifest, bucket))
            largest[t.name] = max(size, largest.get(t.name, 0))
    return {
        "weights": dict(sorted(formats.items())),
        "weights_bytes": manifest.weights_bytes,
        **cache_facts(manifest),
        "inputs_and_outputs_bytes": dict(sorted(largest.items())),
        "buckets": [
            {
                "bucket": b.name,
                "arena_bytes": b.arena_bytes,
                "buffers_bytes": sum(p.num_bytes for p in b.placements),
                "scratch_bytes_per_thread": b.scratch_bytes_per_thread,
            }
            for b in manifest.buckets
        ],
    }


def manifest_facts(manifest: Manifest) -> dict[str, Any]:
    """The manifest as it is stored."""
    tree: dict[str, Any] = to_json(manifest)
    return tree


def summary_facts(manifest: Manifest) -> dict[str, Any]:
    """An artifact in a few lines."""
    launches = sorted({len(b.launches) for b in manifest.buckets})
    return {
        "model": manifest.model.name,
        "family": manifest.model.family,
        "target": f"{manifest.target.name}:{manifest.target.variant}",
        "compiler": manifest.target.compiler,
        "dtype": manifest.dtype,
        "mode": manifest.mode,
        "invariance": manifest.invariance,
        "schedules": manifest.compile_config.get("schedules", "unknown"),
        "numerics_digest": manifest.numerics_digest,
        "weights_bytes": manifest.weights_bytes,
        "weights_digest": manifest.weights_digest,
        "max_context": manifest.model.max_context,
        "kernels": len(manifest.kernels),
        "launches_per_step": launches[0] if len(launches) == 1 else launches,
        "buckets": [b.name for b in manifest.buckets],
        "dims": {d.name: f"{d.role} {d.lower}..{d.upper}" for d in manifest.dims},
    }
