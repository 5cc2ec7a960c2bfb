"""What a step of a DeepSeek-V4.1 model would take if nothing but bytes and operations counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.runtime.artifact import (
    Argument,
    BucketRecord,
    LaunchRecord,
    Manifest,
    StateRecord,
    evaluate,
)
from tilewright.runtime.plan_check import tensor_bytes
from tilewright.runtime.plan_memory import PlanMemory

WINDOW, SELECTED, CANDIDATES = 128, 512, 2048 * 8


@dataclass(frozen=True)
class Rates:
    """What the chip was measured to do a second: bytes, operations in bf16."""

    bandwidth: float
    flops: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The time of the slower of the two."""
        return max(num_bytes / self.bandwidth, flops / self.flops)


@dataclass(frozen=True)
class StepShape:
    """A step of `requests` requests that each compute the last `tokens` of `context` positions."""

    requests: int
    context: int
    tokens: int


class Floors:
    """Bytes and operations of the launches of one step. `experts`: by launch, how many it meets."""

    def __init__(
        self, manifest: Manifest, bucket: BucketRecord, dims: Mapping[str, int],
        shape: StepShape, experts: Mapping[int, int], rates: Rates,
    ) -> None:  # fmt: skip
        self.bucket, self._dims, self._shape = bucket, dims, shape
        self._experts, self._rates = experts, rates
        self._plan = PlanMemory(manifest, 1)
        self._weights = {w.name: w for w in manifest.weights}
        self._states = {s.name: s for s in manifest.states}
        self._kernels = {k.symbol: k for k in manifest.kernels}

    def launch(self, index: int) -> dict[str, Any]:
        """Bytes of weights and cache, bytes of rows in and out, operations, and the time of all
        of it in microseconds."""
        launch = self.bucket.launches[index]
        kept = sum(self._kept(index, launch, a) for a in launch.arguments)
        moved = sum(self._moved(a) for a in launch.arguments)
        flops = self._flops(launch)
        return {
            "template": self._kernels[launch.kernel].template, "kept_bytes": kept,
            "moved_bytes": moved, "flops": flops,
            "floor_us": self._rates.seconds(kept + moved, flops) * 1e6,
        }  # fmt: skip

    def step_ms(self) -> float:
        """The larger of: weights and cache once over the bandwidth; operations over the peak."""
        found = [self.launch(i) for i in range(len(self.bucket.launches))]
        kept, flops = (float(sum(each[k] for each in found)) for k in ("kept_bytes", "flops"))
        return self._rates.seconds(kept, flops) * 1e3

    def _tokens(self) -> int:
        return self._shape.requests * self._shape.tokens

    def _kept(self, index: int, launch: LaunchRecord, argument: Argument) -> int:
        if argument.kind == "weight":
            weight = self._weights[argument.name]
            if argument.name.endswith("embed.weight"):
                rows = self._tokens() * (24 if "engram" in argument.name else 1)
                return weight.num_bytes // weight.shape[0] * rows
            if index in self._experts:
                return weight.num_bytes // weight.shape[0] * self._experts[index]
            return weight.num_bytes
        if argument.kind == "state":
            return self._read(launch, self._states[argument.name])
        return 0

    def _read(self, launch: LaunchRecord, state: StateRecord) -> int:
        """Bytes of a state that a launch reads once; what it stores is a row a token."""
        row = tensor_bytes(state, {d: 1 for d in _names(state)}) // evaluate(state.shape[-2], {})
        shape, template = self._shape, self._kernels[launch.kernel].template
        entries = shape.context // state.positions_per_entry
        each = 1 if template == "row" else min(entries, self._listed(launch, state))
        if shape.tokens > 1 and template != "row":  # neighbours share what they read
            return row * entries * shape.requests
        return row * each * self._tokens()

    def _listed(self, launch: LaunchRecord, state: StateRecord) -> int:
        """The most entries of a state that one token reads."""
        if self._kernels[launch.kernel].template.startswith("latent"):
            return WINDOW if state.scope == "window" else SELECTED
        op = self._kernels[launch.kernel].nodes[-1]
        return CANDIDATES if "within" in op or "select_within" in launch.group else 1 << 30

    def _moved(self, argument: Argument) -> int:
        if argument.kind not in ("buffer", "input", "output"):
            return 0
        record = self._plan.records[argument.kind, argument.name]
        whole = tensor_bytes(record, self._dims)
        padded = self._dims["tokens"]
        return whole * self._tokens() // padded if padded > self._tokens() else whole

    def _flops(self, launch: LaunchRecord) -> int:
        """Operations of the step's own tokens; of index scores, those of entries they see."""
        kernel = self._kernels[launch.kernel]
        dims = {**self._dims, "tokens": self._tokens()}
        found = evaluate(kernel.flops, dims)
        if kernel.template.startswith("select") and self._shape.tokens > 1:
            found //= 2  # a token sees half of its prompt on average
        return found


def _names(state: StateRecord) -> list[str]:
    return [e for e in state.shape if isinstance(e, str)]
