"""The table of targets: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewright.codegen.target import Target, Toolchain
from tilewright.graph.errors import TargetError
from tilewright.targets.cpu.target import VARIANTS, cpu_target
from tilewright.targets.cpu.toolchain import CppToolchain

MakeToolchain = Callable[[Target, str | None], Toolchain]


def _cpp(target: Target, cxx: str | None) -> Toolchain:
    return CppToolchain(target, cxx=cxx)


TARGETS: Mapping[str, tuple[Callable[[str | None], Target], MakeToolchain]] = {
    "cpu": (cpu_target, _cpp),
}


def resolve(name: str, *, cxx: str | None = None) -> tuple[Target, Toolchain]:
    """Return the target `cpu`, or a variant such as `cpu:x86-64-v4`, with its toolchain."""
    base, _, variant = name.partition(":")
    if base not in TARGETS:
        variants = ", ".join(f"cpu:{v}" for v in VARIANTS)
        raise TargetError(f"target '{name}': unknown: have {', '.join(TARGETS)} ({variants})")
    make_target, make_toolchain = TARGETS[base]
    target = make_target(variant or None)
    return target, make_toolchain(target, cxx)
