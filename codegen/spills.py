"""Kernels whose registers do not hold their values are built again in other schedules.

A schedule that was measured on its own chip is kept: what it spills is in its time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from tilewright.codegen.body import Body
from tilewright.codegen.plan import Bucket, Candidate, Chooser, bucket_rows
from tilewright.codegen.select import Choice
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import Toolchain


@runtime_checkable
class ReportsSpills(Protocol):
    """A toolchain whose objects say how many bytes a thread keeps outside registers."""

    def spilled_bytes(self, compiled: Path) -> int: ...


def spilling(
    toolchain: Toolchain, sources: Sequence[KernelSource], object_of: Callable[[KernelSource], Path]
) -> set[str]:
    """Return the symbols of generated kernels that spill; none where the toolchain does not say.

    What a kernel written in CUDA keeps outside registers does not depend on its schedule.
    """
    if not isinstance(toolchain, ReportsSpills):
        return set()
    generated = [s for s in sources if s.language != "cuda"]
    return {s.name for s in generated if toolchain.spilled_bytes(object_of(s))}


def avoiding(choose: Chooser, refused: Container[str]) -> Chooser:
    """Choose as `choose` does, but of schedules that are not measured none whose kernel is in
    `refused`, unless all are."""

    def chosen(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        first = choose(body, choice, bucket)
        if first.measured or _symbol(body, first) not in refused:
            return first
        rows = bucket_rows(body, bucket)
        for schedule in first.template.schedules(body.graph, first.numerics, rows):
            other = replace(first, schedule=schedule)
            if _symbol(body, other) not in refused:
                return other
        return first

    return chosen


def _symbol(body: Body, candidate: Candidate) -> str:
    template = candidate.template
    spec = KernelSpec(
        template.kind, body.graph, template.name, candidate.numerics, candidate.schedule,
        body.buffers,
    )  # fmt: skip
    return spec.symbol
