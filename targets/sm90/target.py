"""NVIDIA H100 and H200: compute capability 9.0. Rates were measured on an H200."""

from __future__ import annotations

from tilewright.codegen.target import Target
from tilewright.targets.nvidia.target import nvidia_target, only_variant
from tilewright.targets.sm90.kernels import KERNELS

SM90 = nvidia_target(90, KERNELS, peak_flops=790e12, peak_bandwidth=4.3e12)


def sm90_target(variant: str | None = None) -> Target:
    """Return the target; TargetError for a variant it does not have."""
    return only_variant(SM90, variant)
