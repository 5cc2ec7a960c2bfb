"""The table of targets: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewright.codegen.target import Target, Toolchain
from tilewright.graph.errors import TargetError
from tilewright.targets.ascend950.target import ascend950_target
from tilewright.targets.ascend950.toolchain import ascend950_toolchain
from tilewright.targets.cpu.target import VARIANTS, cpu_target
from tilewright.targets.cpu.toolchain import CppToolchain
from tilewright.targets.sm90.target import sm90_target
from tilewright.targets.sm90.toolchain import sm90_toolchain
from tilewright.targets.sm100.target import sm100_target
from tilewright.targets.sm100.toolchain import sm100_toolchain

MakeToolchain = Callable[[Target, str | None], Toolchain]


def _cpp(target: Target, cxx: str | None) -> Toolchain:
    return CppToolchain(target, cxx=cxx)


TARGETS: Mapping[str, tuple[Callable[[str | None], Target], MakeToolchain]] = {
    "cpu": (cpu_target, _cpp),
    "ascend950": (ascend950_target, ascend950_toolchain),
    "sm90": (sm90_target, sm90_toolchain),
    "sm100": (sm100_target, sm100_toolchain),
}


def resolve(name: str, *, cxx: str | None = None) -> tuple[Target, Toolchain]:
    """Return the target `cpu`, or a variant such as `cpu:x86-64-v4`, with its toolchain."""
    base, _, variant = name.partition(":")
    if base not in TARGETS:
        variants = ", ".join(f"cpu:{v}" for v in VARIANTS)
        raise TargetError(f"target '{name}': unknown: have {', '.join(TARGETS)} ({variants})")
    make_target, make_toolchain = TARGETS[base]
    target = make_target(variant if ":" in name else None)
    return target, make_toolchain(target, cxx)
