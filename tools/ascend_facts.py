"""What a step of an artifact does on the Ascend model: cycles by pipe, bytes by path, memories.

Cycles are modelled from the chip's numbers; nothing here was measured on an NPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.runtime.artifact import Manifest
from tilewright.runtime.artifact_files import read_manifest
from tilewright.runtime.devices import ascend950_model
from tilewright.runtime.engine import Engine
from tilewright.runtime.errors import ArtifactError
from tilewright.tools.failures import writing

PROMPT_TOKENS = 8
MOST_PARTS = 4  # of a memory that one instruction wrote, each on a line of its own
Range = tuple[str, int, int, str, str, int]  # memory, first byte, end, pipe, call, line


def pipe_facts(path: Path, *, trace: Path | None = None) -> list[dict[str, Any]]:
    """Run one step of a few tokens on the model; return a record for each kernel. `trace`: also
    write the timeline of its pipes, which Perfetto loads.

    Raises ArtifactError for an artifact that is not for the functional model.
    """
    manifest = read_manifest(path)
    if not ascend950_model.accepts(manifest.target):
        raise ArtifactError(
            f"stage 'pipes': artifact '{path}' is for {manifest.target.name}: want one that was "
            "compiled with --target ascend950 --simulate"
        )
    rng = np.random.default_rng(0)
    most = min(PROMPT_TOKENS, manifest.model.max_context)
    tokens = [int(i) for i in rng.integers(0, manifest.model.vocab_size, most)]
    with Engine(path, num_threads=None) as engine:
        model = ascend950_model.Ascend950Model(path.absolute() / manifest.library)
        model.configure(trace=trace is not None, buffers=True)
        engine.logits(tokens)
        if trace is not None:
            with writing(trace):
                trace.write_text(model.trace())
        found = model.facts()
        model.configure()
    return [{**record, "groups": _groups(manifest, record["kernel"])} for record in found]


def _groups(manifest: Manifest, kernel: str) -> list[str]:
    """Return the fused groups of the graph that a device kernel computes, or a part of."""
    launches = [launch for bucket in manifest.buckets for launch in bucket.launches]
    return list(dict.fromkeys(x.group for x in launches if kernel.startswith(f"k_{x.kernel}")))


def pipe_lines(facts: list[dict[str, Any]]) -> Iterator[str]:
    """Return the records as text."""
    total = sum(record["cycles"] for record in facts)
    yield f"one step of at most {PROMPT_TOKENS} tokens on the functional model"
    yield f"{total} cycles one kernel after the other, modelled and never measured"
    for record in facts:
        launches, groups = record["launches"], record["groups"]
        yield ""
        yield f"{record['kernel']}: {launches} x {record['cycles'] // launches} cycles"
        yield f"  computes {groups[0]}" + (f" and {len(groups) - 1} more" if groups[1:] else "")
        busy = ", ".join(f"{pipe} {cycles // launches}" for pipe, cycles in record["busy"].items())
        yield f"  busy cycles over all cores: {busy}"
        moved = ", ".join(f"{name} {n // launches}" for name, n in record["bytes"].items())
        yield f"  bytes: {moved}"
        used = ", ".join(
            f"{name} {first}..{end} of {size}"
            for name, (first, end, size) in record["buffers"].items()
        )
        yield f"  memories: {used}"
        yield from _map_lines(record["map"])


def _map_lines(ranges: list[Range]) -> Iterator[str]:
    """What each instruction left, in order; one that left many parts on one line."""
    parts: dict[tuple[str, str, str, int], list[tuple[int, int]]] = {}
    for memory, first, end, pipe, call, line in ranges:
        parts.setdefault((memory, pipe, call, line), []).append((first, end))
    lines = []
    for (memory, pipe, call, line), found in parts.items():
        by = f"{call} on {pipe}, line {line}"
        if len(found) > MOST_PARTS:
            size = sum(end - first for first, end in found)
            span = f"{found[0][0]}..{found[-1][1]}"
            lines.append((memory, found[0][0], f"{span} in {len(found)} parts, {size} bytes: {by}"))
        else:
            lines += [(memory, first, f"{first}..{end}: {by}") for first, end in found]
    for memory, _, text in sorted(lines):
        yield f"    {memory} {text}"
