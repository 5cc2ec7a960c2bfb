"""Where a step's time goes: seconds, bytes and operations of every kernel, and what is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from tilewright.runtime.executor import Executor
from tilewright.tools.bench_engine import CostTable
from tilewright.tools.plain_step import Step


@dataclass(frozen=True)
class KernelTime:
    """One kernel over all its launches in a step; `group` is the first that uses it."""

    kernel: str
    group: str
    launches: int
    seconds: float
    num_bytes: int
    flops: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.num_bytes / self.seconds if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StepTime:
    """A step by kernel, slowest first; `step_seconds` is the whole call, host side included."""

    name: str
    bucket: str
    kernels: tuple[KernelTime, ...]
    step_seconds: float

    @property
    def kernel_seconds(self) -> float:
        return sum(k.seconds for k in self.kernels)

    def to_json(self) -> dict[str, Any]:
        """Return the table with rates in GB/s and GFLOP/s."""
        rows = [
            {
                "kernel": k.kernel,
                "group": k.group,
                "launches": k.launches,
                "seconds": k.seconds,
                "bytes": k.num_bytes,
                "flops": k.flops,
                "gb_per_s": k.bandwidth / 1e9,
                "gflop_per_s": k.rate / 1e9,
            }
            for k in self.kernels
        ]
        return {
            "name": self.name,
            "bucket": self.bucket,
            "step_seconds": self.step_seconds,
            "kernel_seconds": self.kernel_seconds,
            "host_seconds": self.step_seconds - self.kernel_seconds,
            "kernels": rows,
        }


def time_step(
    executor: Executor, costs: CostTable, name: str, step: Step, *, repeat: int
) -> StepTime:
    """Run one step `repeat` times; take the median of every launch, and of the whole call."""
    executor.run(step.inputs, step.dims)
    whole, single = [], []
    for _ in range(repeat):
        begin = time.perf_counter()
        executor.run(step.inputs, step.dims)
        whole.append(time.perf_counter() - begin)
        single.append([t.seconds for t in executor.time_launches(step.inputs, step.dims)])
    medians: list[float] = np.median(np.array(single), axis=0).tolist()
    bucket = executor.bucket(step.dims)
    dims = dict(step.dims)
    launches = bucket.launches
    per_launch = [
        KernelTime(launch.kernel, launch.group, 1, seconds, *reversed(costs.launch(launch, dims)))
        for launch, seconds in zip(launches, medians, strict=True)
    ]
    return StepTime(name, bucket.name, _by_kernel(per_launch), float(median(whole)))


def _by_kernel(launches: Sequence[KernelTime]) -> tuple[KernelTime, ...]:
    found: dict[str, KernelTime] = {}
    for each in launches:
        sum_ = found.get(each.kernel)
        if sum_ is None:
            found[each.kernel] = each
            continue
        found[each.kernel] = KernelTime(
            sum_.kernel,
            sum_.group,
            sum_.launches + 1,
            sum_.seconds + each.seconds,
            sum_.num_bytes + each.num_bytes,
            sum_.flops + each.flops,
        )
    return tuple(sorted(found.values(), key=lambda k: -k.seconds))
