"""The lowering pipeline: a tuple of named passes that reads on one screen. The runner verifies,
times and dumps after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, TypeAlias

from tilewright.codegen.flags import Flags
from tilewright.codegen.passes.early import part_early
from tilewright.codegen.passes.fuse import fuse
from tilewright.graph import Graph
from tilewright.graph.errors import LowerError
from tilewright.graph.rewrite import (
    canonical_order,
    eliminate_dead,
    expand_composites,
    merge_equal,
)
from tilewright.graph.text import print_graph
from tilewright.graph.verify import Stage, verify


@dataclass(frozen=True)
class Decision:
    """A rule of a pass touched these nodes."""

    stage: str
    rule: str
    nodes: tuple[str, ...]


Step: TypeAlias = Callable[[Graph], tuple[Graph, Sequence[Decision]]]


@dataclass(frozen=True)
class Pass:
    """A pure function on graphs, and the stage its result must satisfy."""

    name: str
    run: Step
    stage: Stage


def _canonicalize(graph: Graph) -> tuple[Graph, Sequence[Decision]]:
    return canonical_order(merge_equal(eliminate_dead(graph))), ()


def _decompose(graph: Graph) -> tuple[Graph, Sequence[Decision]]:
    expanded, applied = expand_composites(graph)
    decisions = [Decision("decompose", a.rule, (a.node,)) for a in applied]
    return canonical_order(merge_equal(expanded)), decisions


def _fuse(graph: Graph) -> tuple[Graph, Sequence[Decision]]:
    fused, applied = fuse(graph)
    return fused, [Decision("fuse", a.rule, a.nodes) for a in applied]


def _part(graph: Graph) -> tuple[Graph, Sequence[Decision]]:
    parted, applied = part_early(graph)
    return parted, [Decision("part", a.rule, a.nodes) for a in applied]


PASSES = (
    Pass("canonicalize", _canonicalize, Stage.MODEL),
    Pass("decompose", _decompose, Stage.DECOMPOSED),
    Pass("fuse", _fuse, Stage.FUSED),
)
PART = Pass("part", _part, Stage.FUSED)  # for targets whose launches may run beside each other


@dataclass(frozen=True)
class Lowered:
    """The graph after all passes, with what every rule did and how long each pass took
    (seconds)."""

    graph: Graph
    decisions: tuple[Decision, ...]
    seconds: tuple[tuple[str, float], ...]


def lower(
    graph: Graph, flags: Flags, *, log: TextIO | None = None, beside: bool = False
) -> Lowered:
    """Run every pass; raise VerifyError naming the node if a stage's rules are broken. `beside`:
    launches may run beside each other."""
    verify(graph, Stage.MODEL)
    dump(flags.dump, "00_model.txt", graph)
    decisions: list[Decision] = []
    seconds = []
    passes = (*PASSES, PART) if beside else PASSES
    for number, step in enumerate(passes, start=1):
        start, before = time.perf_counter(), graph
        graph, made = step.run(graph)
        verify(graph, step.stage)
        seconds.append((step.name, time.perf_counter() - start))
        decisions += made
        dump(flags.dump, f"{number:02}_{step.name}.txt", graph)
        if log:
            _report(log, flags.debug, step, before, graph, seconds[-1][1], made)
    return Lowered(graph, tuple(decisions), tuple(seconds))


def dump(folder: Path | None, name: str, graph: Graph) -> None:
    """Write a stage as byte-stable text where a dump folder is set."""
    if folder is not None:
        with dumping(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(print_graph(graph))


@contextmanager
def dumping(folder: Path) -> Iterator[None]:
    """Say in an error of writing that it is about the dump folder."""
    try:
        yield
    except OSError as error:
        raise LowerError(
            f"dump folder '{folder}': cannot be written: {error.strerror or error}; name another "
            "folder in TILEWRIGHT_DUMP"
        ) from None


def _report(
    log: TextIO,
    debug: int,
    step: Pass,
    before: Graph,
    after: Graph,
    seconds: float,
    made: Sequence[Decision],
) -> None:
    if debug >= 1:
        log.write(
            f"pass {step.name}: {len(before.nodes)} -> {len(after.nodes)} nodes, "
            f"{len(after.groups)} groups, {seconds * 1e3:.0f} ms\n"
        )
    if debug >= 3:
        import difflib

        old, new = (print_graph(replace(g)).splitlines() for g in (before, after))
        for line in difflib.unified_diff(old, new, "before", step.name, lineterm="", n=1):
            log.write(line + "\n")
    if debug >= 5:
        for decision in made:
            log.write(f"rule {decision.rule}: {', '.join(decision.nodes)}\n")
