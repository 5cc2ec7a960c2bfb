"""NVIDIA B200: compute capability 10.0. Nobody has run it: rates are the data sheet's, dense."""

from __future__ import annotations

from tilewright.codegen.target import Target
from tilewright.targets.nvidia.target import nvidia_target, only_variant
from tilewright.targets.sm100.kernels import KERNELS

SM100 = nvidia_target(100, KERNELS, peak_flops=2250e12, peak_bandwidth=8e12)


def sm100_target(variant: str | None = None) -> Target:
    """Return the target; TargetError for a variant it does not have."""
    return only_variant(SM100, variant)
