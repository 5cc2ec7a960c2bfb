"""Kernels whose registers do not hold their values are built again in other schedules; those that a
machine has no compiler for, or that want too much scratch, are not chosen where another schedule
gives the same bits.

A schedule that was measured on its own chip is kept: what it spills is in its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from tilewright.codegen.arguments import needs_scratch
from tilewright.codegen.body import Body
from tilewright.codegen.plan import Bucket, Candidate, Chooser, bucket_rows
from tilewright.codegen.select import Choice
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.codegen.target import Toolchain
from tilewright.runtime.artifact import MAX_SCRATCH


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
) -> dict[str, int]:
    """Map the symbols of generated kernels that spill to bytes a thread; empty where the toolchain
    does not say.

    What a kernel written in CUDA keeps outside registers does not depend on its schedule.
    """
    if not isinstance(toolchain, ReportsSpills):
        return {}
    generated = {s.name: object_of(s) for s in sources if s.language != "cuda"}
    spilled = {name: toolchain.spilled_bytes(compiled) for name, compiled in generated.items()}
    return {name: count for name, count in spilled.items() if count}


def avoiding(
    choose: Chooser, spilled: Mapping[str, int], lacks: Callable[[Schedule], bool]
) -> Chooser:
    """Choose as `choose` does, but none that `lacks` says cannot be built here or whose scratch no
    artifact may want, and of schedules that are not measured none whose kernel spills, or that
    which spills least where all do."""

    def chosen(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        first = choose(body, choice, bucket)

        def can_run(candidate: Candidate) -> bool:
            fits = _scratch(body, candidate, bucket) <= MAX_SCRATCH
            return fits and not lacks(candidate.schedule)

        def spills(candidate: Candidate) -> int:
            return 0 if candidate.measured else spilled.get(_symbol(body, candidate), 0)

        if can_run(first) and not spills(first):
            return first
        rows = bucket_rows(body, bucket)
        schedules = first.template.schedules(body.graph, first.numerics, rows)
        others = [replace(first, schedule=s, measured=False) for s in schedules]
        return min(filter(can_run, (first, *others)), key=spills, default=first)

    return chosen


def _scratch(body: Body, candidate: Candidate, bucket: Bucket) -> int:
    """Bytes of scratch of a launch, or of each of its threads."""
    if not needs_scratch(candidate.template.kind):
        return 0
    return candidate.template.scratch_bytes(
        body.graph, candidate.numerics, candidate.schedule, bucket.bounds
    )


def _symbol(body: Body, candidate: Candidate) -> str:
    template = candidate.template
    spec = KernelSpec(
        template.kind, body.graph, template.name, candidate.numerics, candidate.schedule,
        body.buffers,
    )  # fmt: skip
    return spec.symbol
