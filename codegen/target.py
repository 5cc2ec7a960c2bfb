"""What a target is: a chip's numbers, its kernel templates in order of preference, its
toolchain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from tilewright.codegen.spec import Numerics, Schedule
from tilewright.graph import Graph
from tilewright.graph.errors import TargetError


@dataclass(frozen=True)
class BuildResult:
    """A loadable file and what the toolchain said about making it."""

    path: Path
    log: str = ""


class Toolchain(Protocol):
    """Turns kernel sources into loadable files. Raises TargetError with the compiler's words."""

    def identity(self) -> str:
        """Compiler version and flags: part of every cache key and of the numerics digest."""
        ...

    def compile(self, source: Path, output: Path) -> None:
        """Compile one source to an object."""
        ...

    def link(self, objects: Sequence[Path], output: Path) -> None:
        """Link objects into the library the runtime loads."""
        ...

    def support_sources(self) -> Mapping[str, str]:
        """Fixed sources that every library of this target contains, by file name."""
        ...


@runtime_checkable
class PreparesHeaders(Protocol):
    """A toolchain that is quicker with many sources once it has read its headers."""

    def prepare(self, folder: Path) -> None:
        """Read the support sources in `folder` once for all that is compiled there."""
        ...


@runtime_checkable
class PrintsSources(Protocol):
    """A toolchain with a language of its own in between: what it printed goes into the artifact."""

    def printed(self, file_name: str, text: str) -> Mapping[str, str]:
        """Return further files of one source, by name."""
        ...


@dataclass(frozen=True)
class KernelTemplate:
    """One row of a kernel table.

    `accepts(body)` returns None, or why not. `schedules(body, rows, threads)` lists legal schedules
    for steps of up to `rows` rows, best first: heuristic and search space at once.
    `scratch_bytes(body, numerics, schedule, bounds)` is per thread; a GPU counts as one thread.
    """

    name: str
    kind: str
    path: str
    accepts: Callable[[Graph], str | None]
    schedules: Callable[[Graph, Numerics, int], tuple[Schedule, ...]]
    scratch_bytes: Callable[[Graph, Numerics, Schedule, Mapping[str, int]], int]

    @property
    def language(self) -> str:
        """The language its text is in: the folder of templates it lies in."""
        return self.path.partition("/")[0]


@dataclass(frozen=True)
class Target:
    """A validated record of a chip variant. Rates are per second: flops, bytes.

    `tuned` names the target whose committed records choose schedules; none where they are kept
    on the machine that measured them.
    `full_columns`: sums of one row that fill the chip; fewer are taken in segments. 0: never.
    `full_code_columns`, `full_value_columns`: the same of products of codes, and of bf16 values.
    `beside_tokens`: launches of steps of so many tokens may run beside each other."""

    name: str
    variant: str
    language: str
    features: tuple[str, ...]
    flags: tuple[str, ...]
    machine: str
    lanes: int
    attend_chunk: int
    attend_chunks: tuple[int, ...]
    scale_order: str
    peak_flops: float
    peak_bandwidth: float
    buckets: tuple[int, ...]
    kernels: tuple[KernelTemplate, ...]
    invariance: str = "proven"
    atom: str = "fma"
    code_atom: str = ""  # of products of float codes with float codes, where there is one
    tuned: str = ""
    full_columns: int = 0
    full_code_columns: int = 0
    full_value_columns: int = 0
    beside_tokens: int = 0
    macros: Mapping[str, str] = field(default_factory=dict)
    latent_chunk: int | None = None  # of attention over latent rows, where it is another
    latent_weights: str = "whole"  # of the same, in products with packed rows

    @property
    def beside(self) -> bool:
        """Whether launches of small steps may run beside each other."""
        return self.beside_tokens > 0

    def __post_init__(self) -> None:
        names = [k.name for k in self.kernels]
        if len(set(names)) != len(names):
            raise TargetError(f"target '{self.name}': two kernel templates share a name: {names}")
        if self.attend_chunk not in self.attend_chunks:
            raise TargetError(
                f"target '{self.name}': attend_chunk: got {self.attend_chunk}, "
                f"want one of {self.attend_chunks}"
            )
        for flag in self.flags:
            if flag in FORBIDDEN_FLAGS:
                raise TargetError(
                    f"target '{self.name}': flag {flag} lets the compiler reorder sums"
                )


FORBIDDEN_FLAGS = (
    "-ffast-math",
    "-Ofast",
    "-fassociative-math",
    "-funsafe-math-optimizations",
    "-freciprocal-math",
    "-ffp-contract=fast",
    "-mrecip",
)
