"""NVIDIA H100 and H200: compute capability 9.0. Rates were measured on an H200."""

from __future__ import annotations

from tilewright.codegen.target import Target
from tilewright.graph.errors import TargetError
from tilewright.targets.sm90.kernels import KERNELS

SM90 = Target(
    name="sm90",
    variant="sm90a",
    language="triton",
    features=("sm_90a",),
    flags=("enable_fp_fusion=False",),
    machine="x86_64",
    lanes=256,
    attend_chunk=128,
    attend_chunks=(64, 128, 256),
    scale_order="dequantise",
    peak_flops=790e12,
    peak_bandwidth=4.3e12,
    buckets=(1, 4, 8, 16, 32, 64, 128, 256),
    kernels=KERNELS,
    invariance="unproven",
    atom="mma",
)


def sm90_target(variant: str | None = None) -> Target:
    """Return the target; TargetError for a variant it does not have."""
    if variant not in (None, SM90.variant):
        raise TargetError(f"sm90 variant '{variant}': unknown: have {SM90.variant}")
    return SM90
