"""Flags for parts of the C++ templates that tests compile by themselves."""

from __future__ import annotations

from tilewright.targets.registry import resolve

# GCC 12's own headers of AVX-512 read vectors before they set them, as it says itself.
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized")


def instruction_flags() -> list[str]:
    """Return what names the instruction set of target cpu, as kernels are compiled."""
    return [flag for flag in resolve("cpu")[0].flags if flag.startswith("-m")]
