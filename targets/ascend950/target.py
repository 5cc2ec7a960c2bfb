"""Ascend 950 parts. Everything here is checked on a functional model, never run on an NPU.

A variant names a part by its matrix cores; `+model` after it means: for the functional model, which
runs on this machine's CPU.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

from tilewright.codegen.target import Target
from tilewright.graph.errors import TargetError
from tilewright.targets.ascend950.kernels import kernels

MODEL_SUFFIX = "+model"
# Matrix cores and bytes a second of each part.
PARTS: Mapping[str, tuple[int, float]] = {
    "950pr-32": (32, 1.6e12),
    "950pr-28": (28, 1.6e12),
    "950dt-36": (36, 4.0e12),
    "950-8": (8, 4.0e11),
    "950-4": (4, 2.0e11),
}
_BF16_FLOPS = 432e12 / 32  # a core
DEFAULT, DEFAULT_MODEL = "950pr-32", "950-4"  # few cores: fewer blocks without work on the model


def ascend950_target(variant: str | None = None) -> Target:
    """Return a part by name, for the chip or for the model; TargetError lists the known ones."""
    name = DEFAULT if variant is None else variant
    part = DEFAULT_MODEL if name == MODEL_SUFFIX else name.removesuffix(MODEL_SUFFIX)
    if part not in PARTS:
        raise TargetError(
            f"ascend950 variant '{name}': unknown: have {', '.join(PARTS)}, each also with "
            f"{MODEL_SUFFIX} for the functional model"
        )
    cores, bandwidth = PARTS[part]
    simulated = name.endswith(MODEL_SUFFIX)
    return Target(
        name="ascend950",
        variant=part + (MODEL_SUFFIX if simulated else ""),
        language="ascendc",
        features=(platform.machine(),) if simulated else (),
        flags=(),
        machine=platform.machine() if simulated else "dav-3510",
        lanes=32,
        attend_chunk=128,
        attend_chunks=(64, 128, 256),
        scale_order="dequantise",
        peak_flops=_BF16_FLOPS * cores,
        peak_bandwidth=bandwidth,
        buckets=(1, 16),
        kernels=kernels(cores),
        invariance="unproven",
    )
