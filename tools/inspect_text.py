"""The stages of an artifact as text that is the same byte for byte at every run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewright.runtime import ArtifactError
from tilewright.tools.artifact_facts import (
    kernel_facts,
    manifest_facts,
    memory_facts,
    numerics_facts,
    plan_facts,
    summary_facts,
)
from tilewright.tools.artifact_text import ArtifactText

STAGES = (
    "model", "fused", "plan", "kernels", "numerics", "memory", "coverage", "manifest"
)  # fmt: skip


def stage_facts(artifact: ArtifactText, stage: str | None) -> Any:
    """Return one of STAGES as JSON data; no stage is the summary. Pipes, a stage that runs the
    artifact, is none of these."""
    manifest = artifact.manifest
    match stage:
        case None:
            return summary_facts(manifest)
        case "model" | "fused":
            return {"stage": stage, "text": artifact.text(f"sources/{stage}.txt")}
        case "plan":
            return plan_facts(manifest)
        case "kernels":
            return kernel_facts(manifest)
        case "numerics":
            return numerics_facts(manifest, artifact.decisions()["groups"])
        case "memory":
            return memory_facts(manifest)
        case "coverage":
            from tilewright.tools.target_facts import coverage_facts

            return coverage_facts()
        case "manifest":
            return manifest_facts(manifest)
    raise AssertionError(f"stage '{stage}' is none of {STAGES}")


def stage_text(artifact: ArtifactText, stage: str | None) -> str:
    """Return a stage as text."""
    facts = stage_facts(artifact, stage)
    match stage:
        case "model" | "fused":
            return str(facts["text"])
        case "plan":
            lines = _plan_lines(facts)
        case "kernels":
            lines = _kernel_lines(facts)
        case "numerics":
            lines = _numerics_lines(facts)
        case "memory":
            lines = _memory_lines(facts)
        case "coverage":
            lines = _coverage_lines(facts)
        case "manifest":
            return json.dumps(facts, indent=1) + "\n"
        case _:
            lines = (f"{name:<20}{_plain(value)}" for name, value in facts.items())
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in values.items())


def _plan_lines(buckets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for bucket in buckets:
        sizes = ", ".join(f"{k} <= {v}" for k, v in bucket["bounds"].items())
        yield f"bucket {bucket['bucket']}: {sizes}"
        yield (
            f"  arena {bucket['arena_bytes']} bytes, "
            f"scratch {bucket['scratch_bytes_per_thread']} bytes a thread"
        )
        for i, launch in enumerate(bucket["launches"]):
            arguments = [f"{a['kind']} {a['name']}: {a['type']}" for a in launch["arguments"]]
            yield f"  {i:>4} {launch['kernel']} {launch['group']}"
            yield from (f"         {a}" for a in arguments)
            yield f"         ints {', '.join(launch['ints'])}"


def _kernel_lines(kernels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for kernel in kernels:
        yield f"kernel {kernel['kernel']}"
        yield f"  template  {kernel['template']}"
        yield f"  nodes     {' '.join(kernel['nodes'])}"
        yield f"  numerics  {_pairs(kernel['numerics'])}"
        yield f"  schedule  {_pairs(kernel['schedule'])}"
        yield f"  flops     {kernel['flops']}"
        yield f"  bytes     {kernel['bytes']}"
        yield f"  launches  {_pairs(kernel['launches'])}"
        yield f"  source    {kernel['source']}"


def _numerics_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    for name in ("numerics_digest", "mode", "invariance"):
        yield f"{name} {facts[name]}"
    for row in facts["groups"]:
        yield f"group {row['group']} ({row['template']}, {row['groups']} alike)"
        if row["one_for_all_buckets"]:
            yield f"  numerics  {_pairs(row['numerics'])}"
        for bucket, schedule in row["schedules"].items():
            if not row["one_for_all_buckets"]:
                yield f"  numerics  {bucket}: {_pairs(row['numerics'][bucket])}"
            yield f"  schedule  {bucket}: {_pairs(schedule)}"


def _memory_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"weights {facts['weights_bytes']} bytes"
    for name, row in facts["weights"].items():
        yield f"  {name}: {row['tensors']} tensors, {row['bytes']} bytes"
    yield (
        f"cache {facts['cache_bytes_per_token']} bytes a token, in blocks of "
        f"{facts['cache_block_size']} tokens"
    )
    yield (
        f"  a full context of {facts['max_context']} tokens: "
        f"{facts['cache_bytes_per_full_context']} bytes"
    )
    for row in facts["states"]:
        yield (
            f"  {len(row['states'])} states of {row['format']}, {row['scope']}: "
            f"{row['bytes_per_position']:g} bytes a position"
        )
    if window := facts["window"]:
        yield (
            f"window {window['bytes_per_sequence']} bytes a sequence, "
            f"{window['pages_per_sequence']} pages of {window['page_positions']} tokens; "
            f"a snapshot copies {window['snapshot_bytes']} bytes"
        )
    yield "inputs and outputs, largest"
    for name, size in facts["inputs_and_outputs_bytes"].items():
        yield f"  {name}: {size} bytes"
    for bucket in facts["buckets"]:
        yield (
            f"bucket {bucket['bucket']}: arena {bucket['arena_bytes']} bytes for "
            f"{bucket['buffers_bytes']} bytes of buffers, "
            f"scratch {bucket['scratch_bytes_per_thread']} bytes a thread"
        )


def _coverage_lines(facts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    targets = list(next(iter(facts.values())))
    yield f"{'op':<24}{''.join(f'{t:<14}' for t in targets)}".rstrip()
    for op, row in facts.items():
        yield f"{op:<24}{''.join(f'{row[t]:<14}' for t in targets)}".rstrip()


def kernel_source(artifact: ArtifactText, name: str) -> str:
    """Return the source of a kernel named by symbol, or of all kernels of a group or node.

    Raises ArtifactError listing the kernels where there is none of that name.
    """
    kernels = artifact.manifest.kernels
    wanted = [k for k in kernels if k.symbol == name]
    if not wanted:
        groups = artifact.decisions()["groups"]
        owner = next((g for g in groups if name == g["group"] or name in g["nodes"]), None)
        symbols = set(owner["kernels"].values()) if owner else set()
        wanted = [k for k in kernels if k.symbol in symbols]
    if not wanted:
        known = ", ".join(k.symbol for k in kernels)
        raise ArtifactError(f"kernel '{name}': unknown: have {known}, or the name of a node")
    return "\n".join(artifact.text(k.source) for k in wanted)
