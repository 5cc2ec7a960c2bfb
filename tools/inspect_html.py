"""One self-contained page about an artifact: no script, style or picture comes from elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tilewright.graph import Graph
from tilewright.graph.text import parse_graph, print_node
from tilewright.runtime.artifact import BucketRecord, KernelRecord, Manifest
from tilewright.targets.registry import TARGETS
from tilewright.tools.artifact_facts import (
    extent_text,
    memory_facts,
    numerics_facts,
    summary_facts,
    tensor_types,
)
from tilewright.tools.artifact_text import ArtifactText
from tilewright.tools.graph_view import View, find_layers, view_groups, view_nodes
from tilewright.tools.svg_graph import draw
from tilewright.tools.svg_memory import bytes_text, draw_arena
from tilewright.tools.target_facts import (
    PLAUSIBLE_CONTEXT,
    coverage_facts,
    roofline,
    target_of,
)

TEMPLATES = Path(__file__).resolve().parent.parent / "templates" / "html"


def page(artifact: ArtifactText) -> str:
    """Return the page; raise ArtifactError where a file of the artifact was edited."""
    manifest, decisions = artifact.manifest, artifact.decisions()
    before = parse_graph(artifact.text("sources/model.txt"))
    after = parse_graph(artifact.text("sources/fused.txt"))
    numerics = numerics_facts(manifest, decisions["groups"])
    facts = {
        "summary": summary_facts(manifest),
        "memory": memory_facts(manifest),
        "numerics": numerics,
        "coverage": coverage_facts(),
        "targets": list(TARGETS),
        "before": _drawn(view_nodes(before)),
        "after": _drawn(view_groups(after)),
        "num_before": len(before.nodes),
        "num_groups": len(after.groups),
        "kernels": _kernel_rows(manifest, numerics["groups"]),
        "arenas": _arenas(manifest),
        "rules": _rule_rows(decisions["rules"]),
        "context": PLAUSIBLE_CONTEXT,
        "data": _script_data(artifact, after, before, decisions["groups"]),
    }
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = bytes_text
    environment.filters["pairs"] = lambda values: " ".join(f"{k}={v}" for k, v in values.items())
    return environment.get_template("page.html.j2").render(facts)


def _drawn(view: View) -> str:
    return draw(view.boxes, view.edges, view.spans)


def _arenas(manifest: Manifest) -> list[dict[str, Any]]:
    types = {
        name: text for (kind, name), text in tensor_types(manifest).items() if kind == "buffer"
    }
    return [
        {
            "bucket": b.name,
            "bounds": dict(b.bounds),
            "arena": b.arena_bytes,
            "scratch": b.scratch_bytes_per_thread,
            "buffers": len(b.placements),
            "svg": draw_arena(b, types),
        }
        for b in manifest.buckets
    ]


def _rule_rows(rules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    counts = Counter((r["stage"], r["rule"]) for r in rules)
    return [
        {
            "stage": stage,
            "rule": rule,
            "count": count,
            "examples": [
                " ".join(r["nodes"]) for r in rules if (r["stage"], r["rule"]) == (stage, rule)
            ][:20],
        }
        for (stage, rule), count in counts.items()
    ]


def _kernel_rows(manifest: Manifest, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per distinct group: numerics, and per bucket the kernel, its schedule and cost."""
    kernels = {k.symbol: k for k in manifest.kernels}
    buckets = {b.name: b for b in manifest.buckets}
    return [
        {
            **row,
            "variants": [
                _variant(manifest, kernels[symbol], buckets[bucket])
                for bucket, symbol in row["kernels"].items()
            ],
            "flops": extent_text(kernels[next(iter(row["kernels"].values()))].flops),
            "bytes": extent_text(kernels[next(iter(row["kernels"].values()))].num_bytes),
        }
        for row in groups
    ]


def _variant(manifest: Manifest, kernel: KernelRecord, bucket: BucketRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "bucket": bucket.name,
        "kernel": kernel.symbol,
        "schedule": dict(kernel.schedule),
        "cost": None,
    }
    target = target_of(manifest)
    if target is not None:
        flops, num_bytes, seconds = roofline(manifest, kernel, bucket, target)
        found["cost"] = {
            "flops": f"{flops / 1e6:.2f}",
            "bytes": bytes_text(num_bytes),
            "microseconds": f"{seconds * 1e6:.1f}",
        }
    return found


def _script_data(
    artifact: ArtifactText, after: Graph, before: Graph, groups: Sequence[Mapping[str, Any]]
) -> str:
    """What the page's script shows on demand, as JSON that no markup can end."""
    manifest = artifact.manifest
    shown, layers, model_layers = {}, find_layers(after), find_layers(before)
    for group in groups:
        if layers.is_shown(group["group"]):
            shown[group["group"]] = {
                "kind": group["kind"],
                "template": group["template"],
                "refusals": group["refusals"],
                "kernels": group["kernels"],
                "nodes": [print_node(after.node[n]) for n in group["nodes"]],
            }
    plans = [
        {
            "bucket": b.name,
            "launches": [
                [x.kernel, x.group, [f"{a.kind} {a.name}" for a in x.arguments]] for x in b.launches
            ],
        }
        for b in manifest.buckets
    ]
    tree = {
        "groups": shown,
        "nodes": {n.name: print_node(n) for n in before.nodes if model_layers.is_shown(n.name)},
        "sources": {k.symbol: artifact.text(k.source) for k in manifest.kernels},
        "schedules": {k.symbol: dict(k.schedule) for k in manifest.kernels},
        "numerics": {k.symbol: dict(k.numerics) for k in manifest.kernels},
        "costs": {
            k.symbol: f"{extent_text(k.flops)} flops, {extent_text(k.num_bytes)} bytes"
            for k in manifest.kernels
        },
        "plans": plans,
    }
    text = json.dumps(tree, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
