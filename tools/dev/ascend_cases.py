"""Records one launch of every kernel of an artifact for the Ascend model, for a run on the chip:
what each was given, and what it left. The driver that ascend_bisheng.sh builds reads them.

    python -m tilewright.tools.dev.ascend_cases ARTIFACT FOLDER

The artifact is one that was compiled with --simulate for the part that will run it. Largest weights
are written too: take a small model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.arguments import argument_names
from tilewright.codegen.body import Body, extract
from tilewright.graph import Graph
from tilewright.graph.text import parse_graph
from tilewright.graph.types import BlockFormat
from tilewright.runtime.artifact import LaunchRecord
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.devices.registry import open_device
from tilewright.runtime.executor import Executor
from tilewright.tools.plain_step import page_dims, plain_step

Array = NDArray[Any]
TOKENS = 16


class CaseRecorder:
    """An observer of steps that writes the first launch of each kernel into a folder."""

    def __init__(self, graph: Graph, folder: Path) -> None:
        self._graph, self._folder = graph, folder
        self._groups = {g.name: g for g in graph.groups}
        self._given: list[Array] = []
        self.lines: dict[str, str] = {}

    def before(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        self._given = [] if launch.kernel in self.lines else [t.copy() for t in tensors]

    def after(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        if launch.kernel in self.lines:
            return
        body, number, words = extract(self._graph, self._groups[launch.group]), len(self.lines), []
        names = argument_names(body.graph)
        for place, (given, left) in enumerate(zip(self._given, tensors, strict=True)):
            kind = compared(body, names[place]) if place < len(names) else "-"
            stem = self._folder / f"{number}.{place}"
            stem.with_name(stem.name + ".in").write_bytes(given.tobytes())
            if kind != "-":
                stem.with_name(stem.name + ".want").write_bytes(left.tobytes())
            words += [str(given.nbytes), kind]
        extents = [str(i) for i in ints]
        self.lines[launch.kernel] = " ".join(
            [launch.kernel, str(len(extents)), *extents, str(len(tensors)), *words]
        )
        self._given = []


def compared(body: Body, name: str) -> str:
    """Return how the driver compares an argument: results and states that a kernel writes."""
    graph = body.graph
    written = {value for _, value in graph.outputs} | {state for state, _ in graph.state_outputs}
    if name not in written:
        return "-"
    dtype = graph.type_of(name).dtype
    if isinstance(dtype, BlockFormat):
        return "bytes" if name in graph.state else "bf16"
    return {"f32": "f32", "bf16": "bf16"}.get(dtype.name, "bytes")


def record(artifact: Path, folder: Path) -> int:
    """Write the cases of one step; return their number."""
    folder.mkdir(parents=True, exist_ok=True)
    found = load_artifact(artifact, choose_device=lambda m: open_device(m, num_threads=1))
    recorder = CaseRecorder(parse_graph((artifact / "sources" / "fused.txt").read_text()), folder)
    manifest = found.manifest
    count = min(TOKENS, manifest.model.max_context - 1)
    drawn = np.random.default_rng(0).integers(0, manifest.model.vocab_size, count)
    with Executor(found, found.device) as executor:
        executor.allocate_states(page_dims(manifest, positions=count))
        step = plain_step(manifest, [int(i) for i in drawn], start=0, all_logits=True)
        executor.observe(step.inputs, step.dims, recorder)
    (folder / "cases.txt").write_text("\n".join([*recorder.lines.values(), ""]))
    return len(recorder.lines)


if __name__ == "__main__":
    print(record(Path(sys.argv[1]), Path(sys.argv[2])), "kernels")
