"""Kernels whose registers do not hold their values are built again in other schedules; those that a
machine has no compiler for are not chosen there, where another schedule gives the same bits.

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
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.codegen.target import Toolchain


@runtime_checkable
class ReportsSpills(Protocol):
    """A toolchain whose objects say how many bytes a thread keeps outside registers."""

    def spilled_bytes(self, compiled: Path) -> int: ...


@runtime_checkable
class LacksCompilers(Protocol):
    """A toolchain that can build some schedules only with what not every machine has."""

    def lacks(self, schedule: Schedule) -> bool: ...


def lacking(toolchain: Toolchain) -> Callable[[Schedule], bool]:
    """Return what says whether a schedule cannot be built here."""
    return toolchain.lacks if isinstance(toolchain, LacksCompilers) else lambda schedule: False


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


def avoiding(
    choose: Chooser, refused: Container[str], lacks: Callable[[Schedule], bool]
) -> Chooser:
    """Choose as `choose` does, but none that `lacks` says cannot be built here, and of schedules
    that are not measured none whose kernel is in `refused`, unless all are."""

    def chosen(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        first = choose(body, choice, bucket)
        keeps = first.measured or _symbol(body, first) not in refused
        if keeps and not lacks(first.schedule):
            return first
        rows = bucket_rows(body, bucket)
        for schedule in first.template.schedules(body.graph, first.numerics, rows):
            other = replace(first, schedule=schedule)
            if _symbol(body, other) not in refused and not lacks(schedule):
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
