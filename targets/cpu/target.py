"""CPU variants: each instruction set is a class of bits of its own."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from tilewright.codegen.target import Target
from tilewright.graph.errors import TargetError
from tilewright.targets.cpu.kernels import KERNELS

# Contraction is explicit, so the compiler must never form or split a fused multiply-add. Neither
# errno nor traps are read, and neither flag below can change a result.
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-w",
)
# Whose bitwise tests have run on the hardware; others say unproven. A machine gets the first one.
PROVEN = ("x86-64-v3", "x86-64-v4", "x86-64-v4-bf16")
_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


def _variant(
    variant: str,
    machine: str,
    features: tuple[str, ...],
    march: tuple[str, ...],
    flops: float,
) -> Target:
    return Target(
        name="cpu",
        variant=variant,
        language="cpp",
        features=features,
        flags=(*COMMON_FLAGS, *march),
        machine=machine,
        lanes=16,
        attend_chunk=128,
        attend_chunks=(32, 64, 128, 256),
        scale_order="dequantise",
        code_atom="integer",
        peak_flops=flops,
        peak_bandwidth=25e9,
        buckets=(1, 4, 16),
        kernels=KERNELS,
        invariance="proven" if variant in PROVEN else "unproven",
    )


VARIANTS: Mapping[str, Target] = {
    t.variant: t
    for t in (
        _variant("x86-64-v3", "x86_64", _V3, ("-march=x86-64-v3",), 96e9),
        _variant("x86-64-v4", "x86_64", _V4, ("-march=x86-64-v4",), 150e9),
        _variant(
            "x86-64-v4-bf16",
            "x86_64",
            (*_V4, "avx512_bf16"),
            ("-march=x86-64-v4", "-mavx512bf16"),
            150e9,
        ),
        _variant("aarch64", "aarch64", ("asimd",), ("-march=armv8.2-a",), 40e9),
    )
}


def cpu_target(variant: str | None = None) -> Target:
    """Return a variant by name, or the one `host_variant` chooses; TargetError lists the known
    ones."""
    if variant is None:
        return VARIANTS[host_variant()]
    if variant not in VARIANTS:
        raise TargetError(f"cpu variant '{variant}': unknown: have {', '.join(VARIANTS)}")
    return VARIANTS[variant]


def host_variant() -> str:
    """Return the name of the variant for this machine.

    AVX-512 must be asked for by name: steps of one token were no faster with it.
    """
    machine, flags = platform.machine(), host_features()
    if machine == "aarch64":
        return "aarch64"
    for variant in PROVEN:
        if machine == "x86_64" and flags.issuperset(VARIANTS[variant].features):
            return variant
    raise TargetError(
        f"cpu target: this machine ({machine}) has no known variant: "
        f"want one of {', '.join(VARIANTS)}"
    )


def host_features() -> frozenset[str]:
    """Return the feature names the kernel reports for the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
