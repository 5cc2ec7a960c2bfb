"""The order of the nests of a row program, and which share the loops over their outer axes.

Nests that walk the same outer extents run one after the other for each outer index, so that what
passes between them is one line of the last axis, and stays near. Order cannot change bits.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from tilewright.codegen.emit.row_demand import Guard


@dataclass(frozen=True)
class Nest:
    """One loop nest over `shape`: `sinks` are the nodes it stores, or the one it reduces. `outer`
    are the extents of the loops around it. With a guard, only rows that one of these slots stores
    something for run it. `reads` are the kept values it needs, `whole` those it reads as a whole.
    """

    stage: int
    kind: str  # loop | reduce | call
    shape: tuple[int, ...]
    pairing: str
    sinks: tuple[str, ...]
    outer: tuple[int, ...] = ()
    guard: Guard = None
    reads: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Run:
    """Nests inside of the same loops over `outer`. `local` values live in one of its turns."""

    outer: tuple[int, ...]
    guard: Guard
    nests: tuple[Nest, ...]
    local: tuple[str, ...] = ()


def arrange(nests: Sequence[Nest]) -> list[list[Nest]]:
    """Return the nests in an order in which they can run, in lists that share their loops.

    Nests come in an order in which they can run; the next one is one that continues the list, else
    the first that is ready.
    """
    waiting, done, found = list(nests), set[str](), list[list[Nest]]()
    kept = {name for nest in nests for name in nest.sinks}
    while waiting:
        ready = [n for n in waiting if _needs(n) & kept <= done]
        last = found[-1][-1] if found else None
        chosen = next((n for n in ready if last and _same_loops(n, last)), ready[0])
        waiting.remove(chosen)
        done.update(chosen.sinks)
        if last and _same_loops(chosen, last):
            found[-1].append(chosen)
        else:
            found.append([chosen])
    return found


def _needs(nest: Nest) -> Set[str]:
    return nest.reads | (nest.guard or frozenset())


def _same_loops(a: Nest, b: Nest) -> bool:
    return bool(a.outer) and a.outer == b.outer and a.guard == b.guard


def runs_of(nests: Sequence[Nest], private: Set[str]) -> tuple[Run, ...]:
    """Return the runs of a program. `private` are kept values that go nowhere else, and that have
    one line for each turn of the loops around the nest that makes them."""
    arranged = arrange(nests)
    found = []
    for members in arranged:
        outside = [n for run in arranged if run is not members for n in run]
        read_elsewhere = {name for nest in outside for name in nest.reads}
        read_whole = {name for nest in members for name in nest.whole}
        made = [s for nest in members for s in nest.sinks if nest.outer and s in private]
        local = tuple(s for s in made if s not in read_elsewhere | read_whole)
        found.append(Run(members[0].outer, members[0].guard, tuple(members), local))
    return tuple(found)
