"""NVIDIA B200: compute capability 10.0. Nobody has run it: rates are the data sheet's, dense."""

from __future__ import annotations

from tilewright.codegen.target import Target
from tilewright.graph.errors import TargetError
from tilewright.targets.sm100.kernels import KERNELS

SM100 = Target(
    name="sm100",
    variant="sm100a",
    language="triton",
    features=("sm_100a",),
    flags=("enable_fp_fusion=False",),
    machine="x86_64",
    lanes=256,
    attend_chunk=128,
    attend_chunks=(64, 128, 256),
    scale_order="dequantise",
    peak_flops=2250e12,
    peak_bandwidth=8e12,
    buckets=(1, 4, 8, 16, 32, 64, 128, 256),
    kernels=KERNELS,
    invariance="unproven",
    atom="mma",
)


def sm100_target(variant: str | None = None) -> Target:
    """Return the target; TargetError for a variant it does not have."""
    if variant not in (None, SM100.variant):
        raise TargetError(f"sm100 variant '{variant}': unknown: have {SM100.variant}")
    return SM100
