"""KernelSpec: one fused kernel, as data. What decides bits (`Numerics`) is apart from what decides
speed (`Schedule`); a tuner can only reach the second.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tilewright.graph import Graph
from tilewright.graph.errors import LowerError
from tilewright.graph.types import TensorType

_NAMES = {
    "accumulate": ("f32",),
    "atom": ("fma", "mma", "wgmma_e4m3", "mx", "integer"),
    "combine": ("in_order", "tree"),
    "scale_order": ("none", "dequantise", "factored"),
    "subnormals": ("kept", "flushed"),
    "weights": ("whole", "rounded"),
}


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Every choice that changes result bits. Plain ints and names only, checked on construction.

    `chunk`: entries (of K or of the cache) accumulated as one unit, counted from position 0; 0 is
    the whole axis. `segments`: parts of K accumulated apart and added in order. `lanes`: partial
    sums of a row reduction, combined by a fixed tree. `atom`: fused multiply-adds one by one, or a
    matrix instruction over 16 values of k; over codes, `wgmma_e4m3` (sums of `chunk` values of k
    leave the matrix unit and are scaled and added in fp32), `mx` (scales enter the unit) or
    `integer` (a sum of `chunk` values of k is exact, and rounded once).
    `scale_order`: whether block scales are applied to each weight, or to the sum of a block.
    `weights`: whether the weights of an attention meet values of 16 bits whole, as a sum of parts,
    or rounded to the values' type.
    """

    accumulate: str = "f32"
    atom: str = "fma"
    chunk: int = 0
    segments: int = 1
    lanes: int = 1
    combine: str = "in_order"
    scale_order: str = "none"
    subnormals: str = "kept"
    weights: str = "whole"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _NAMES:
                ok = type(value) is str and value in _NAMES[field.name]
                want = " or ".join(_NAMES[field.name])
            else:
                ok = type(value) is int and value >= (0 if field.name == "chunk" else 1)
                want = "an int known when the kernel is generated"
            if not ok:
                raise LowerError(f"numerics '{field.name}': got {value!r}, want {want}")

    def to_json(self) -> dict[str, int | str]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Schedule:
    """Choices that change only speed: a flat, ordered mapping of names to ints."""

    params: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name, value in self.params:
            if type(name) is not str or type(value) is not int:
                raise LowerError(f"schedule '{name}': got {value!r}, want an int")

    @classmethod
    def of(cls, **params: int) -> Schedule:
        return cls(tuple(sorted(params.items())))

    @property
    def values(self) -> Mapping[str, int]:
        return dict(self.params)

    def to_json(self) -> dict[str, int]:
        return dict(self.params)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.params)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to generate: `body` is the fused group with names normalised, so that equal layers
    give equal specs. `buffers` gives the stored type of operands that the body sees through a view.
    """

    kind: str
    body: Graph
    template: str
    numerics: Numerics
    schedule: Schedule
    buffers: tuple[tuple[str, TensorType], ...] = ()

    def stored_type(self, name: str) -> TensorType:
        """Return the type of a tensor argument as it lies in memory."""
        return dict(self.buffers).get(name) or self.body.type_of(name)

    @cached_property
    def digest(self) -> str:
        """Hash of everything the generated text depends on, apart from templates and target."""
        facts = [
            self.kind,
            self.body.digest,
            self.template,
            self.numerics.to_json(),
            self.schedule.to_json(),
            [(n, str(t)) for n, t in self.buffers],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def symbol(self) -> str:
        """Name of the kernel in its library."""
        return f"{self.template}_{self.digest[:12]}"
