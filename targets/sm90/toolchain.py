"""The chip's toolchain: the shared one, for compute capability 90."""

from __future__ import annotations

from tilewright.codegen.target import Target
from tilewright.targets.nvidia.toolchain import NvidiaToolchain

CAPABILITY = 90


def sm90_toolchain(target: Target, cxx: str | None) -> NvidiaToolchain:
    """Return a toolchain; `cxx` names the C++ compiler of the host side."""
    return NvidiaToolchain(target, capability=CAPABILITY, cxx=cxx)
