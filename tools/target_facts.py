"""What targets add to an artifact's facts: kernels of every op, and times that no kernel beats."""

from __future__ import annotations

from tilewright.codegen.cost import roofline_seconds
from tilewright.codegen.coverage import coverage
from tilewright.codegen.target import Target
from tilewright.graph.errors import TargetError
from tilewright.runtime.artifact import BucketRecord, KernelRecord, Manifest, evaluate
from tilewright.runtime.plan_check import bucket_limits
from tilewright.targets.registry import TARGETS, resolve

PLAUSIBLE_CONTEXT = 512  # positions per request where a roofline time needs some


def coverage_facts() -> dict[str, dict[str, str]]:
    """Ops by targets: the template whose kernel covers each, view, decomposed, or missing."""
    found: dict[str, dict[str, str]] = {}
    for name in TARGETS:
        target, _ = resolve(name)
        for op, cover in coverage(target).items():
            found.setdefault(op, {})[name] = cover
    return found


def target_of(manifest: Manifest) -> Target | None:
    """Return the chip an artifact was built for, or None where this version knows it no more."""
    try:
        return resolve(f"{manifest.target.name}:{manifest.target.variant}")[0]
    except TargetError:
        return None


def roofline(
    manifest: Manifest, kernel: KernelRecord, bucket: BucketRecord, target: Target
) -> tuple[int, int, float]:
    """Return operations, bytes, and seconds no kernel beats on one thread, for a full bucket.

    A request is taken to have PLAUSIBLE_CONTEXT positions, not the longest context.
    """
    dims = bucket_limits(manifest, bucket)
    most = max(1, PLAUSIBLE_CONTEXT // manifest.model.block_size)
    if "request_blocks" in dims:
        dims["request_blocks"] = min(dims["request_blocks"], most)
    flops, num_bytes = evaluate(kernel.flops, dims), evaluate(kernel.num_bytes, dims)
    return flops, num_bytes, roofline_seconds(flops, num_bytes, target)
