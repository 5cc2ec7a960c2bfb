"""What the records of NVIDIA chips share; each chip gives its name, its numbers and its kernels."""

from __future__ import annotations

from tilewright.codegen.target import KernelTemplate, Target
from tilewright.graph.errors import TargetError

FULL_COLUMNS = 32768  # 512 programs of 64 columns on about 140 cores
# Wide tiles of bf16 values have no registers for sums of segments beside those of the whole: from
# 4,096 columns on there is one segment. Products of codes keep them in shared memory.
FULL_CODE_COLUMNS, FULL_VALUE_COLUMNS = 32767, 8191


def nvidia_target(
    capability: int,
    kernels: tuple[KernelTemplate, ...],
    *,
    peak_flops: float,
    peak_bandwidth: float,
) -> Target:
    """Return the record of a chip; rates per second, `capability` 90 for compute capability 9.0."""
    return Target(
        name=f"sm{capability}",
        variant=f"sm{capability}a",
        language="triton",
        features=(f"sm_{capability}a",),
        flags=(f"arch=sm_{capability}a", "enable_fp_fusion=False"),
        machine="x86_64",
        lanes=1024,
        attend_chunk=128,
        attend_chunks=(64, 128, 256),
        latent_chunk=64,
        latent_weights="rounded",
        scale_order="dequantise",
        peak_flops=peak_flops,
        peak_bandwidth=peak_bandwidth,
        buckets=(1, 4, 8, 16, 32, 64, 128, 256),
        kernels=kernels,
        invariance="unproven",
        atom="mma",
        code_atom="wgmma_e4m3" if capability == 90 else "mx",
        tuned="sm90",  # SM100 could not be measured: it takes the order of SM90
        full_columns=FULL_COLUMNS,
        full_code_columns=FULL_CODE_COLUMNS,
        full_value_columns=FULL_VALUE_COLUMNS,
        beside_tokens=512,  # larger ones fill the chip launch by launch
    )


def only_variant(target: Target, variant: str | None) -> Target:
    """Return the target; TargetError for a variant it does not have."""
    if variant not in (None, target.variant):
        raise TargetError(f"{target.name} variant '{variant}': unknown: have {target.variant}")
    return target
